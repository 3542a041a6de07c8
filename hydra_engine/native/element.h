// The arithmetic of an update, for one element: update.cpp makes vectors of it on the host, update.cu runs it on a GPU.
//
// One rule for both: IEEE roundings in the order of torch's fused CPU step. What that step contracts to a fused
// multiply-add is one here (`madd`); nothing else is (host: -ffp-contract=off; GPU: --fmad=false), and denormals stay
// (--ftz=false). So no bit depends on where an update is made, except in NaN, which is NaN in both. Only a host without
// the instruction rounds each product, as torch does there.
//
// Arguments that are the same for all elements of a loop (`Settings`, `is_near`, `is_tail`) are tested here: compilers
// move such tests out of the loop, and drop those of constants.

#pragma once

#if defined(__CUDACC_RTC__)  // it has no headers of the standard library
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#endif

#if !defined(__CUDACC__) && defined(__F16C__)
#include <immintrin.h>
#endif

enum Type : int32_t { kFloat32, kBFloat16, kFloat16 };
enum Rule : int32_t { kAdam, kSgd };

// MKL's vmsSqrt: length, values, roots, mode.
extern "C" using RootsOfLibrary = void (*)(int64_t, const float*, float*, int64_t);

// Numbers of a step, the same for all elements of a parameter.
struct Settings {
    int32_t num_factors;
    float factors[3];       // the gradient is multiplied by them, one after the other; those that it has not are 1
    float weight_decay;     // added to the gradient, times the weight
    float keep;             // Adam: the weight is multiplied by it first
    float beta1, one_minus_beta1;  // Adam. SGD: momentum, and one minus dampening
    float beta2, one_minus_beta2;
    float correction;       // Adam: roots are divided by it
    float eps;
    float minus_step;       // minus the step size
    int32_t nesterov;
};

// A parameter and its options, as PLACES and REST of update.py pack them. Pointers are to dense memory.
struct Update {
    float* master;        // null: the weight is split
    const void* gradient;
    void* narrow;         // null: nothing crosses the link
    int16_t* rest;        // of a split weight: its remainder
    union {               // elements of a split weight that its halves do not tell
        const int64_t* apart_places;  // on the host: ascending
        uint32_t* ties;               // on a GPU: a bit for each element, set for a tie that was rounded down
    };
    const int32_t* apart_bits;    // on the host: of the weight there
    void* moments[3];     // Adam: the first, the second, the largest second so far (amsgrad). SGD: momentum. Null: none
    int64_t size;
    int64_t tail;         // the last elements, in which torch's fused kernels contract otherwise
    int64_t num_apart;    // on the host
    RootsOfLibrary roots_of_library;  // on the host; null: they are taken here
    Type gradient_type;
    Type narrow_type;
    Type moments_type;    // bfloat16: rounded by turns
    int32_t turn;         // that moments are rounded by; negative: to nearest
    Rule rule;
    int32_t refines_roots;  // on the host: square roots as MKL's on some processors, off by one unit now and then
    Settings settings;
};

// -- operations that each compiler has a name of its own for

#if defined(__CUDACC__)

#define HYDRA_ELEMENT static __device__ __forceinline__

HYDRA_ELEMENT float from_bits(uint32_t bits) { return __uint_as_float(bits); }
HYDRA_ELEMENT uint32_t to_bits(float value) { return __float_as_uint(value); }
HYDRA_ELEMENT float madd(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HYDRA_ELEMENT float divided(float a, float b) { return __fdiv_rn(a, b); }
HYDRA_ELEMENT float root_of(float value) { return __fsqrt_rn(value); }

HYDRA_ELEMENT float from_float16(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

HYDRA_ELEMENT uint16_t to_float16(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#else

#define HYDRA_ELEMENT static inline __attribute__((always_inline))

HYDRA_ELEMENT float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

HYDRA_ELEMENT uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

HYDRA_ELEMENT float madd(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

HYDRA_ELEMENT float divided(float a, float b) { return a / b; }
HYDRA_ELEMENT float root_of(float value) { return std::sqrt(value); }

// Where `hydra_has_float16` of update.cpp says no, nothing calls these.
HYDRA_ELEMENT float from_float16([[maybe_unused]] uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#elif defined(__ARM_FP16_FORMAT_IEEE)
    __fp16 value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#else
    return 0;
#endif
}

HYDRA_ELEMENT uint16_t to_float16([[maybe_unused]] float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, 0);
#elif defined(__ARM_FP16_FORMAT_IEEE)
    const __fp16 rounded = value;
    uint16_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
#else
    return 0;
#endif
}

#endif

// -- narrow numbers

HYDRA_ELEMENT bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

HYDRA_ELEMENT float from_bfloat16(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

// To nearest, ties to even.
HYDRA_ELEMENT uint16_t to_bfloat16(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

// What `round_by_turns` of hydra_engine/host/blocked.py adds to the element at this place, but for its upper half.
HYDRA_ELEMENT uint32_t below_unit(int64_t place, int32_t turn) {
    return static_cast<uint32_t>(place) * 25717 + static_cast<uint32_t>(turn) * 40503;
}

HYDRA_ELEMENT uint16_t to_bfloat16_by_turns(float value, uint32_t below) {
    return static_cast<uint16_t>((to_bits(value) + (below & 0xffff)) >> 16);
}

// -- split weights, as hydra_engine/host/split.py has them

// A tie that is rounded down: the upper half is even, and what is cut off is a half of its unit.
HYDRA_ELEMENT bool is_tie(uint32_t bits) { return (bits & 0x1ffff) == 0x8000; }

HYDRA_ELEMENT float join_halves(uint16_t narrow, int16_t rest) {
    const uint32_t upper = static_cast<uint32_t>(narrow) << 16, lower = static_cast<uint32_t>(rest);
    return from_bits(is_nan(upper) ? lower << 16 : upper + lower);
}

HYDRA_ELEMENT int16_t rest_of(float weight) {
    const uint32_t bits = to_bits(weight);
    return static_cast<int16_t>(is_nan(bits) ? bits >> 16 : bits);
}

// -- steps

HYDRA_ELEMENT float scale_gradient(const Settings& s, float gradient) {
    return gradient * s.factors[0] * s.factors[1] * s.factors[2];
}

HYDRA_ELEMENT float add_decay(const Settings& s, float gradient, float master) {
    return madd(master, s.weight_decay, gradient);
}

// `average` times beta, plus `value` times `scale` times `other`. A tail contracts the first product, all else the last.
HYDRA_ELEMENT float decay_towards(float average, float value, float other, float beta, float scale, bool is_tail) {
    return is_tail ? madd(average, beta, scale * value * other) : madd(scale * value, other, average * beta);
}

// Whether Adam's mean is nearer to the one before than to the gradient: torch.lerp begins at the nearer one.
HYDRA_ELEMENT bool is_near(const Settings& s) { return s.one_minus_beta1 < 0.5f && s.one_minus_beta1 > -0.5f; }

HYDRA_ELEMENT float step_mean(const Settings& s, float gradient, float mean, bool is_near) {
    const float weight = s.one_minus_beta1, distance = gradient - mean;
    return is_near ? madd(weight, distance, mean) : madd(weight - 1, distance, gradient);
}

HYDRA_ELEMENT float step_square(const Settings& s, float gradient, float square, bool is_tail) {
    return decay_towards(square, gradient, gradient, s.beta2, s.one_minus_beta2, is_tail);
}

// Vectors keep NaN, and so does torch.maximum. The std::max of a tail keeps a number that is there.
HYDRA_ELEMENT float step_largest(float square, float largest, bool is_tail) {
    return square > largest || (square != square && !is_tail) ? square : largest;
}

// By the root of the mean square, or of the largest one.
HYDRA_ELEMENT float step_adam_weight(const Settings& s, float mean, float root, float master) {
    const float denominator = divided(root, s.correction) + s.eps;
    return master * s.keep + divided(s.minus_step * mean, denominator);
}

HYDRA_ELEMENT float step_momentum(const Settings& s, float gradient, float momentum, bool is_tail) {
    return decay_towards(momentum, 1, gradient, s.beta1, s.one_minus_beta1, is_tail);
}

HYDRA_ELEMENT float look_ahead(const Settings& s, float gradient, float momentum) {  // Nesterov's
    return madd(momentum, s.beta1, gradient);
}

HYDRA_ELEMENT float step_sgd_weight(const Settings& s, float direction, float master) {
    return madd(direction, s.minus_step, master);
}

// All of Adam, with the processor's roots. largest: of amsgrad (`has_largest`).
//
// All is read before anything is written: cores take a read for one of what was just written where both addresses have
// the same lowest 12 bits, as those of one element have in tensors that each begin a page, and wait. Where moments were
// written before the master was read, updates on the host took 1.03 to 1.24 times as long, by where tensors lay.
HYDRA_ELEMENT void step_adam(const Settings& s, float gradient, float& first, float& second, float& largest,
                             float& master, bool is_near, bool has_largest, bool is_tail) {
    const float old_first = first, old_second = second, old_master = master;
    const float mean = step_mean(s, gradient, old_first, is_near);
    const float square = step_square(s, gradient, old_second, is_tail);
    const float bound = has_largest ? step_largest(square, largest, is_tail) : square;
    first = mean;
    second = square;
    if (has_largest) largest = bound;
    master = step_adam_weight(s, mean, root_of(bound), old_master);
}

// All of SGD, with momentum (`has_momentum`) or without.
HYDRA_ELEMENT void step_sgd(const Settings& s, float gradient, float& momentum, float& master, bool has_momentum,
                            bool is_tail) {
    float direction = gradient;
    if (has_momentum) {
        momentum = step_momentum(s, gradient, momentum, is_tail);
        direction = s.nesterov ? look_ahead(s, gradient, momentum) : momentum;
    }
    master = step_sgd_weight(s, direction, master);
}
