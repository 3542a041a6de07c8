// The update of a shard on a GPU, as one launch. element.h has the arithmetic, so that weights, moments and narrow weights
// have the bits that update.cpp gives them with IEEE roots (`Arithmetic(refines_roots=False)` of update.py).
//
//     nvcc -arch=sm_90 --fmad=false --ftz=false        NVRTC takes the same options, and the folder of element.h
//
// Roots and quotients are correctly rounded without an option (`__fsqrt_rn`, `__fdiv_rn`).
//
// Arguments of `hydra_update`; both arrays, and all that they point to, are in the GPU's memory:
//
//     updates      for each parameter its `Update`, of which no field is read that is "on the host"
//     ends         where each parameter's blocks end, counted over all: sums of ceil(size / kElementsOfBlock)
//     num_updates  their number. A size may be 0
//
// Grid: the last of `ends`. Block: kThreads. A split weight has a bit for each element (`Update::ties`, whole words) in
// the place of a list, whose length would be unknown: it is set where split.py keeps a tie apart. NaN loses its payload.

#include "element.h"

constexpr int32_t kThreads = 256;
// Elements that a thread reads before it steps the first: memory waits for roots and quotients otherwise. They are
// kThreads apart, so that a warp's reads are next to each other wherever tensors begin.
constexpr int32_t kAtOnce = 4;
constexpr int64_t kElementsOfBlock = 8 * kAtOnce * kThreads;

namespace {

struct Element {
    float gradient, master, moments[3];
    uint32_t is_tie;  // that was rounded down
};

HYDRA_ELEMENT float read(const void* values, Type type, int64_t i) {
    if (type == kFloat32) return static_cast<const float*>(values)[i];
    const uint16_t bits = static_cast<const uint16_t*>(values)[i];
    return type == kBFloat16 ? from_bfloat16(bits) : from_float16(bits);
}

HYDRA_ELEMENT void write(void* values, Type type, int64_t i, float value) {
    if (type == kFloat32) {
        static_cast<float*>(values)[i] = value;
    } else {
        static_cast<uint16_t*>(values)[i] = type == kBFloat16 ? to_bfloat16(value) : to_float16(value);
    }
}

HYDRA_ELEMENT Element read_element(const Update& u, int64_t i) {
    Element e{};
    e.gradient = read(u.gradient, u.gradient_type, i);
    if (u.master) {
        e.master = u.master[i];
    } else {
        e.is_tie = u.ties[i / 32] >> (i % 32) & 1;
        const float joined = join_halves(static_cast<const uint16_t*>(u.narrow)[i], u.rest[i]);
        e.master = from_bits(to_bits(joined) + (e.is_tie << 16));
    }
    for (int k = 0; k < 3; ++k) {
        if (u.moments[k]) e.moments[k] = read(u.moments[k], u.moments_type, i);
    }
    return e;
}

HYDRA_ELEMENT void step_element(const Update& u, Element& e, bool is_tail) {
    const Settings& s = u.settings;
    float gradient = s.num_factors ? scale_gradient(s, e.gradient) : e.gradient;
    if (s.weight_decay != 0) gradient = add_decay(s, gradient, e.master);
    if (u.rule == kAdam) {
        float& largest = e.moments[2];
        step_adam(s, gradient, e.moments[0], e.moments[1], largest, e.master, is_near(s), u.moments[2], is_tail);
    } else {
        step_sgd(s, gradient, e.moments[0], e.master, u.moments[0], is_tail);
    }
}

HYDRA_ELEMENT void write_element(const Update& u, const Element& e, int64_t i) {
    for (int k = 0; k < 3; ++k) {
        if (!u.moments[k]) continue;
        if (u.moments_type == kBFloat16 && u.turn >= 0) {
            // All bits of a GPU's NaN are set: the sum would overflow.
            const float moment = is_nan(to_bits(e.moments[k])) ? from_bfloat16(0x7fc0) : e.moments[k];
            static_cast<uint16_t*>(u.moments[k])[i] = to_bfloat16_by_turns(moment, below_unit(i, u.turn));
        } else {
            write(u.moments[k], u.moments_type, i, e.moments[k]);
        }
    }
    if (u.master) u.master[i] = e.master;
    if (u.narrow) write(u.narrow, u.narrow_type, i, e.master);
    if (!u.master) {
        u.rest[i] = rest_of(e.master);
        const uint32_t bits = to_bits(e.master), is_tie_now = is_tie(bits) && !is_nan(bits);
        if (is_tie_now != e.is_tie) atomicXor(u.ties + i / 32, 1u << (i % 32));  // neighbours' bits are in the word
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    hydra_update(const Update* __restrict__ updates, const int64_t* __restrict__ ends, int32_t num_updates) {
    const int64_t block = blockIdx.x;
    int32_t found = 0;  // the first update that ends after this block
    for (int32_t high = num_updates - 1; found < high;) {
        const int32_t middle = (found + high) / 2;
        if (ends[middle] > block) {
            high = middle;
        } else {
            found = middle + 1;
        }
    }
    const Update& u = updates[found];
    const int64_t first = (block - (found ? ends[found - 1] : 0)) * kElementsOfBlock;
    const int64_t end = first + kElementsOfBlock < u.size ? first + kElementsOfBlock : u.size;
    for (int64_t begin = first + threadIdx.x; begin < end; begin += kAtOnce * kThreads) {
        Element elements[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int64_t i = begin + k * kThreads;
            if (i < end) elements[k] = read_element(u, i);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int64_t i = begin + k * kThreads;
            if (i >= end) break;
            step_element(u, elements[k], i >= u.size - u.tail);
            write_element(u, elements[k], i);
        }
    }
}
