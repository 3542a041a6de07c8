// One pass over DRAM for the host update of a shard: hydra_engine/native/update.py calls `hydra_update`.
//
//     narrow gradient (DRAM) -> widened, finished (cache) -> moments, master (DRAM) -> narrow weight (DRAM)
//
// Every line rounds as torch's kernels do: what they contract to a fused multiply-add is one here (`madd`), and nothing
// else is (-ffp-contract=off). The loops are plain, and the compiler makes vectors of them. A block's values pass from
// one loop to the next in the first-level cache.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

// Elements of a block: 512 bytes of each value that stays in the cache. While it is computed, the block after the next
// is fetched: longer blocks, or none fetched, and memory waits for divisions (benchmarks/host_optimizer).
constexpr int64_t kBlock = 128;
constexpr int64_t kAhead = 2 * kBlock;
constexpr int64_t kUnit = 128 * kBlock;  // elements that a thread takes at a time

enum Type : int32_t { kFloat32, kBFloat16, kFloat16 };
enum Rule : int32_t { kAdam, kSgd };

}  // namespace

extern "C" {

// A parameter and its options, as PLACES and REST of update.py pack them. Pointers are to dense memory.
struct Update {
    float* master;
    const void* gradient;
    void* narrow;    // null: nothing crosses the link
    float* first;    // Adam: the first moment. SGD: the momentum; null: none
    float* second;   // Adam: the second moment
    float* largest;  // Adam: the largest second moment so far; null: not kept (amsgrad)
    int64_t size;
    int64_t tail;    // the last elements, in which torch's fused kernels contract otherwise
    Type gradient_type;
    Type narrow_type;
    Rule rule;
    int32_t refines_roots;  // square roots as MKL's, off by one unit now and then
    int32_t num_factors;
    float factors[3];       // the gradient is multiplied by them, one after the other
    float weight_decay;     // added to the gradient, times the weight
    float keep;             // Adam: the weight is multiplied by it first
    float beta1, one_minus_beta1;  // Adam. SGD: momentum, and one minus dampening
    float beta2, one_minus_beta2;
    float correction;       // Adam: roots are divided by it
    float eps;
    float minus_step;       // minus the step size
    int32_t nesterov;
};

}  // extern "C"

namespace {

inline float madd(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// To nearest, ties to even.
inline uint16_t to_bfloat16(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

void widen(const uint16_t* __restrict from, float* __restrict to, int64_t size, Type type) {
    if (type == kBFloat16) {
        for (int64_t i = 0; i < size; ++i) to[i] = from_bits(static_cast<uint32_t>(from[i]) << 16);
        return;
    }
#if defined(__F16C__)
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    for (; i < size; ++i) to[i] = _cvtsh_ss(from[i]);
#elif defined(__ARM_FP16_FORMAT_IEEE)
    for (int64_t i = 0; i < size; ++i) to[i] = reinterpret_cast<const __fp16*>(from)[i];
#endif
}

void narrow(const float* __restrict from, uint16_t* __restrict to, int64_t size, Type type) {
    if (type == kBFloat16) {
        for (int64_t i = 0; i < size; ++i) to[i] = to_bfloat16(from[i]);
        return;
    }
#if defined(__F16C__)
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    for (; i < size; ++i) to[i] = _cvtss_sh(from[i], 0);
#elif defined(__ARM_FP16_FORMAT_IEEE)
    for (int64_t i = 0; i < size; ++i) reinterpret_cast<__fp16*>(to)[i] = from[i];
#endif
}

#if defined(__AVX512F__)
// As MKL, which torch.sqrt calls: an estimate of 14 bits and one correction. Below 2^-64 the correction would lose
// digits, so those are scaled by an even power of two; zeros, infinities and what has no root take the processor's own.
void refined_roots(const float* from, float* to, int64_t size) {
    const __m512 half = _mm512_set1_ps(0.5f), small = _mm512_set1_ps(0x1p-64f);
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 inside = size - i < 16 ? static_cast<__mmask16>((1u << (size - i)) - 1) : 0xffff;
        const __m512 given = _mm512_maskz_loadu_ps(inside, from + i);
        const __mmask16 is_small = _mm512_cmp_ps_mask(given, small, _CMP_LT_OQ);
        const __m512 x = _mm512_mask_mul_ps(given, is_small, given, _mm512_set1_ps(0x1p64f));
        const __m512 estimate = _mm512_rsqrt14_ps(x);
        const __m512 root = _mm512_mul_ps(x, estimate);
        const __m512 rest = _mm512_fnmadd_ps(root, root, x);
        __m512 found = _mm512_fmadd_ps(rest, _mm512_mul_ps(estimate, half), root);
        found = _mm512_mask_mul_ps(found, is_small, found, _mm512_set1_ps(0x1p-32f));
        const __mmask16 is_special = _mm512_fpclass_ps_mask(x, 0xff & ~0x20);
        if (is_special) found = _mm512_mask_sqrt_ps(found, is_special, given);
        _mm512_mask_storeu_ps(to + i, inside, found);
    }
}
#endif

void roots(const float* __restrict from, float* __restrict to, int64_t size, bool refines) {
#if defined(__AVX512F__)
    if (refines) {
        refined_roots(from, to, size);
        return;
    }
#endif
    (void)refines;
    for (int64_t i = 0; i < size; ++i) to[i] = std::sqrt(from[i]);
}

// `average` times beta, plus `value` times `scale` times `other`. A tail contracts the first product, all else the last.
void decay_towards(float* __restrict average, const float* value, const float* other, int64_t size, float beta,
                   float scale, bool is_tail) {
    if (is_tail) {
        for (int64_t i = 0; i < size; ++i) average[i] = madd(average[i], beta, scale * value[i] * (other ? other[i] : 1));
    } else if (other) {
        for (int64_t i = 0; i < size; ++i) average[i] = madd(scale * value[i], other[i], average[i] * beta);
    } else {
        for (int64_t i = 0; i < size; ++i) average[i] = madd(value[i], scale, average[i] * beta);
    }
}

void step_adam(const Update& u, int64_t begin, int64_t size, const float* __restrict gradient, bool is_tail) {
    float* __restrict master = u.master + begin;
    float* __restrict first = u.first + begin;
    float root[kBlock];
    const float weight = u.one_minus_beta1;
    if (std::fabs(weight) < 0.5f) {  // as torch.lerp
        for (int64_t i = 0; i < size; ++i) first[i] = madd(weight, gradient[i] - first[i], first[i]);
    } else {
        for (int64_t i = 0; i < size; ++i) first[i] = madd(weight - 1, gradient[i] - first[i], gradient[i]);
    }
    decay_towards(u.second + begin, gradient, gradient, size, u.beta2, u.one_minus_beta2, is_tail);
    const float* second = u.second + begin;
    if (u.largest) {
        float* __restrict largest = u.largest + begin;
        for (int64_t i = 0; i < size; ++i) {
            largest[i] = second[i] > largest[i] || second[i] != second[i] ? second[i] : largest[i];
        }
        second = largest;
    }
    roots(second, root, size, u.refines_roots);
    for (int64_t i = 0; i < size; ++i) {
        const float denominator = root[i] / u.correction + u.eps;
        master[i] = master[i] * u.keep + (u.minus_step * first[i]) / denominator;
    }
}

void step_sgd(const Update& u, int64_t begin, int64_t size, float* __restrict gradient, bool is_tail) {
    float* __restrict master = u.master + begin;
    const float* direction = gradient;
    if (u.first) {
        float* __restrict momentum = u.first + begin;
        decay_towards(momentum, gradient, nullptr, size, u.beta1, u.one_minus_beta1, is_tail);
        if (u.nesterov) {
            for (int64_t i = 0; i < size; ++i) gradient[i] = madd(momentum[i], u.beta1, gradient[i]);
        } else {
            direction = momentum;
        }
    }
    for (int64_t i = 0; i < size; ++i) master[i] = madd(direction[i], u.minus_step, master[i]);
}

// Fetch a block of these elements into the cache, to be written. An address beyond the end does no harm.
void fetch(const void* elements, int64_t begin, Type type) {
    constexpr int64_t line = 64;
    const int64_t width = type == kFloat32 ? 4 : 2;
    const char* at = static_cast<const char*>(elements) + begin * width;
    for (int64_t k = 0; k < kBlock * width; k += line) __builtin_prefetch(at + k, 1, 3);
}

void step_block(const Update& u, int64_t begin, int64_t size, bool is_tail) {
    float gradient[kBlock];
    fetch(u.gradient, begin + kAhead, u.gradient_type);
    for (const float* values : {u.master, u.first, u.second, u.largest}) {
        if (values) fetch(values, begin + kAhead, kFloat32);
    }
    if (u.narrow) fetch(u.narrow, begin + kAhead, u.narrow_type);
    if (u.gradient_type == kFloat32) {
        std::memcpy(gradient, static_cast<const float*>(u.gradient) + begin, size * sizeof(float));
    } else {
        widen(static_cast<const uint16_t*>(u.gradient) + begin, gradient, size, u.gradient_type);
    }
    for (int32_t k = 0; k < u.num_factors; ++k) {
        const float factor = u.factors[k];
        for (int64_t i = 0; i < size; ++i) gradient[i] *= factor;
    }
    if (u.weight_decay != 0) {
        const float* __restrict master = u.master + begin;
        for (int64_t i = 0; i < size; ++i) gradient[i] = madd(master[i], u.weight_decay, gradient[i]);
    }
    if (u.rule == kAdam) {
        step_adam(u, begin, size, gradient, is_tail);
    } else {
        step_sgd(u, begin, size, gradient, is_tail);
    }
    if (u.narrow && u.narrow_type == kFloat32) {
        std::memcpy(static_cast<float*>(u.narrow) + begin, u.master + begin, size * sizeof(float));
    } else if (u.narrow) {
        narrow(u.master + begin, static_cast<uint16_t*>(u.narrow) + begin, size, u.narrow_type);
    }
}

void step_range(const Update& u, int64_t begin, int64_t end) {
    const int64_t tail = u.size - u.tail;
    while (begin < end) {
        const bool is_tail = begin >= tail;
        const int64_t size = std::min({kBlock, end - begin, is_tail ? end - begin : tail - begin});
        step_block(u, begin, size, is_tail);
        begin += size;
    }
}

}  // namespace

extern "C" {

// Return true if this machine's code widens and narrows float16.
int32_t hydra_has_float16() {
#if defined(__F16C__) || defined(__ARM_FP16_FORMAT_IEEE)
    return 1;
#else
    return 0;
#endif
}

// Take square roots as an update does.
void hydra_roots(const float* from, float* to, int64_t size, int32_t refines) { roots(from, to, size, refines); }

// Return the size of an update here, which the caller's has to be.
int64_t hydra_update_bytes() { return sizeof(Update); }

// Make all updates, with this many threads: the caller, and others that end with the call. They take units in turn, so
// that one that is slow, or another process on its core, does not hold up the rest. No element depends on their number.
void hydra_update(const Update* updates, int64_t num_updates, int64_t num_threads) {
    std::vector<int64_t> ends(num_updates);  // of each update's units, counted over all of them
    int64_t num_units = 0;
    for (int64_t k = 0; k < num_updates; ++k) ends[k] = num_units += (updates[k].size + kUnit - 1) / kUnit;
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t unit = next++; unit < num_units; unit = next++) {
            const auto k = std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin();
            const int64_t begin = (unit - (k ? ends[k - 1] : 0)) * kUnit;
            step_range(updates[k], begin, std::min(begin + kUnit, updates[k].size));
        }
    };
    std::vector<std::thread> team;
    try {
        while (static_cast<int64_t>(team.size()) + 1 < std::min(num_threads, num_units)) team.emplace_back(work);
    } catch (const std::system_error&) {  // the system gives no more threads: those there are do it
    }
    work();
    for (auto& thread : team) thread.join();
}

}  // extern "C"
