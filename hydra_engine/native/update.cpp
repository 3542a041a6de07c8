// One pass over DRAM for the host update of a shard: hydra_engine/native/update.py calls `hydra_update`.
//
//     narrow gradient (DRAM) -> widened, finished (cache) -> moments, master (DRAM) -> narrow weight (DRAM)
//
// Of a split weight (hydra_engine/host/split.py) DRAM has no master, but the narrow weight and a remainder: the master is
// put together from them in the cache, and taken apart again. Moments in bfloat16 are widened and rounded likewise.
//
// element.h has the arithmetic, which rounds as torch's kernels do. The loops are plain, and the compiler makes vectors of
// them. A block's values pass from one loop to the next in the first-level cache; those of Adam as most use it stay in
// registers, in one loop (`step_spans`). Narrow weights, which are only written, go past the cache.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <system_error>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "element.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Elements of a block: 512 bytes of each value that stays in the cache. While it is computed, the block after the next
// is fetched: longer blocks, or none fetched, and memory waits for divisions (benchmarks/host_optimizer).
constexpr int64_t kBlock = 128;
constexpr int64_t kAhead = 2 * kBlock;
// Elements that a thread takes at a time: with half of them two threads took 1.01 to 1.08 times as long, with an eighth
// longer yet; with twice as many, the same within noise.
constexpr int64_t kUnit = 1024 * kBlock;
// Elements of `step_spans`, few enough for registers, and how far ahead it fetches: from 160 on it is slower.
constexpr int64_t kSpan = 32;
constexpr int64_t kAheadOfSpan = 3 * kSpan;
constexpr int64_t kLine = 64;  // bytes of the cache

}  // namespace

extern "C" {

// MKL_Set_Num_Threads_Local: of the calling thread; returns those of before.
using SetThreads = int (*)(int);

// GOMP_parallel of the OpenMP library whose threads torch keeps for its caller: work, its argument, threads, flags.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// An element of a split weight that its new halves do not tell, as FOUND of update.py has it.
struct Found {
    int64_t place;  // -1: there is NaN in the weight, whose remainders are upper halves
    int32_t bits;
    int32_t update;
};

}  // extern "C"

namespace {

void widen(const uint16_t* __restrict from, float* __restrict to, int64_t size, Type type) {
    if (type == kBFloat16) {
        for (int64_t i = 0; i < size; ++i) to[i] = from_bfloat16(from[i]);
        return;
    }
    int64_t whole = 0;
#if defined(__F16C__)
    whole = size - size % 8;
    for (int64_t i = 0; i < whole; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (int64_t i = whole; i < size; ++i) to[i] = from_float16(from[i]);
}

void narrow(const float* __restrict from, uint16_t* __restrict to, int64_t size, Type type) {
    if (type == kBFloat16) {
        for (int64_t i = 0; i < size; ++i) to[i] = to_bfloat16(from[i]);
        return;
    }
    int64_t whole = 0;
#if defined(__F16C__)
    whole = size - size % 8;
    for (int64_t i = 0; i < whole; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (int64_t i = whole; i < size; ++i) to[i] = to_float16(from[i]);
}

// Whether narrow weights are written past the cache: lines of it would be fetched only to be overwritten. Those of a
// split weight are read as well.
bool goes_past_cache([[maybe_unused]] const Update& u) {
#if defined(__AVX2__)
    return u.master && u.narrow && u.narrow_type != kFloat32 && reinterpret_cast<uintptr_t>(u.narrow) % kLine == 0;
#else
    return false;
#endif
}

// Copy narrow weights there past the cache. Both begin lines. Where a line was written in halves, two threads took 1.02
// to 1.1 times as long.
template <int64_t kSize>
inline void copy_past_cache(const uint16_t* from, uint16_t* to) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < kSize; i += 32) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
    }
#elif defined(__AVX2__)
    for (int64_t i = 0; i < kSize; i += 16) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), *reinterpret_cast<const __m256i*>(from + i));
    }
#else
    std::memcpy(to, from, kSize * sizeof *to);
#endif
}

// Let this thread's writes past the cache be seen before those that follow.
void end_writes() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// VML_HA, VML_FTZDAZ_OFF and VML_ERRMODE_IGNORE, as torch calls it.
constexpr int64_t kModeOfTorch = 0x2 | 0x140000 | 0x100;

#if defined(__AVX512F__)
// As MKL on Intel's processors, which torch.sqrt calls: an estimate of 14 bits and one correction. Below 2^-64 the correction would lose
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

void roots(const float* __restrict from, float* __restrict to, int64_t size, [[maybe_unused]] bool refines,
           RootsOfLibrary of_library) {
    if (of_library) return of_library(size, from, to, kModeOfTorch);
#if defined(__AVX512F__)
    if (refines) return refined_roots(from, to, size);
#endif
    for (int64_t i = 0; i < size; ++i) to[i] = root_of(from[i]);
}

// Put a block of a split weight together.
void join_block(const Update& u, int64_t begin, int64_t size, float* __restrict to) {
    const uint16_t* __restrict narrow = static_cast<const uint16_t*>(u.narrow) + begin;
    const int16_t* __restrict rest = u.rest + begin;
    for (int64_t i = 0; i < size; ++i) to[i] = join_halves(narrow[i], rest[i]);
    const int64_t* const end = u.apart_places + u.num_apart;
    const int64_t* place = std::lower_bound(u.apart_places, end, begin);
    for (; place != end && *place < begin + size; ++place) {
        to[*place - begin] = from_bits(static_cast<uint32_t>(u.apart_bits[place - u.apart_places]));
    }
}

// Take a block of a split weight apart; add to `found` what its halves do not tell. Return true if there is NaN.
bool split_block(const Update& u, int64_t begin, int64_t size, const float* __restrict from, int32_t update,
                 std::vector<Found>& found) {
    uint16_t* __restrict narrow = static_cast<uint16_t*>(u.narrow) + begin;
    int16_t* __restrict rest = u.rest + begin;
    uint32_t is_special = 0;
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t bits = to_bits(from[i]);
        narrow[i] = to_bfloat16(from[i]);
        rest[i] = rest_of(from[i]);
        is_special |= is_nan(bits) | is_tie(bits);
    }
    bool has_nan = false;
    for (int64_t i = 0; is_special && i < size; ++i) {
        const uint32_t bits = to_bits(from[i]);
        has_nan |= is_nan(bits);
        if (is_nan(bits) ? (bits & 0xffff) != 0 : is_tie(bits)) {
            found.push_back({begin + i, static_cast<int32_t>(bits), update});
        }
    }
    return has_nan;
}

void round_by_turns(const float* __restrict from, uint16_t* __restrict to, int64_t begin, int64_t size, int32_t turn) {
    const uint32_t first = below_unit(begin, turn);
    for (int64_t i = 0; i < size; ++i) to[i] = to_bfloat16_by_turns(from[i], first + below_unit(i, 0));
}

// Values of a block in float32: in memory, or in the cache if memory has them otherwise.
struct Values {
    float* master;
    float* gradient;
    float* moments[3];
};

// Whether it is Adam as most use it, whose elements are stepped in one loop.
bool is_plain_adam(const Update& u) {
    return u.rule == kAdam && !u.refines_roots && !u.roots_of_library && is_near(u.settings) && !u.moments[2];
}

template <bool kIsTail>
void step_adam_block(const Update& u, const Values& values, int64_t size) {
    const float* __restrict gradient = values.gradient;
    float* __restrict master = values.master;
    float* __restrict first = values.moments[0];
    float* __restrict second = values.moments[1];
    float root[kBlock], none;
    const Settings s = u.settings;  // a copy: else the compiler reads it again after each write, or makes no vectors
    if (!kIsTail && is_plain_adam(u)) {  // values stay in registers
        for (int64_t i = 0; i < size; ++i) {
            step_adam(s, gradient[i], first[i], second[i], none, master[i], true, false, false);
        }
        return;
    }
    const bool near = is_near(s);
    for (int64_t i = 0; i < size; ++i) first[i] = step_mean(s, gradient[i], first[i], near);
    for (int64_t i = 0; i < size; ++i) second[i] = step_square(s, gradient[i], second[i], kIsTail);
    if (float* __restrict largest = values.moments[2]) {
        for (int64_t i = 0; i < size; ++i) largest[i] = step_largest(second[i], largest[i], kIsTail);
    }
    roots(values.moments[2] ? values.moments[2] : second, root, size, u.refines_roots, u.roots_of_library);
    const Settings again = u.settings;  // kept over a library's call, they cost split weights 2 % of an update
    for (int64_t i = 0; i < size; ++i) master[i] = step_adam_weight(again, first[i], root[i], master[i]);
}

template <bool kIsTail>
void step_sgd_block(const Update& u, const Values& values, int64_t size) {
    float* __restrict gradient = values.gradient;
    float* __restrict master = values.master;
    const float* direction = gradient;
    const Settings s = u.settings;
    if (float* __restrict momentum = values.moments[0]) {
        for (int64_t i = 0; i < size; ++i) momentum[i] = step_momentum(s, gradient[i], momentum[i], kIsTail);
        if (s.nesterov) {
            for (int64_t i = 0; i < size; ++i) gradient[i] = look_ahead(s, gradient[i], momentum[i]);
        } else {
            direction = momentum;
        }
    }
    for (int64_t i = 0; i < size; ++i) master[i] = step_sgd_weight(s, direction[i], master[i]);
}

// Fetch so many bytes into the cache, to be written. An address beyond the end does no harm.
template <int64_t kBytes>
void fetch_bytes(const char* at) {
    for (int64_t k = 0; k < kBytes; k += kLine) __builtin_prefetch(at + k, 1, 3);
}

// Fetch a block of these elements, if there are any. In loops of a length that the compiler knows: with others an update of
// whole weights took 6 % longer.
inline void fetch(const void* elements, int64_t begin, Type type) {
    const char* const at = static_cast<const char*>(elements);
    if (!elements) return;
    if (type == kFloat32) {
        fetch_bytes<4 * kBlock>(at + 4 * begin);
    } else {
        fetch_bytes<2 * kBlock>(at + 2 * begin);
    }
}

// Return true if there is NaN in a split weight.
bool step_block(const Update& u, int64_t begin, int64_t size, bool is_tail, int32_t update, std::vector<Found>& found) {
    float gradient[kBlock], whole[kBlock], widened[3][kBlock];
    fetch(u.gradient, begin + kAhead, u.gradient_type);
    fetch(u.master, begin + kAhead, kFloat32);
    const bool is_past = goes_past_cache(u) && size == kBlock;
    if (!is_past) fetch(u.narrow, begin + kAhead, u.narrow_type);
    fetch(u.rest, begin + kAhead, kBFloat16);
    for (const void* moment : u.moments) fetch(moment, begin + kAhead, u.moments_type);

    Values values{u.master ? u.master + begin : whole, gradient, {}};
    if (!u.master) join_block(u, begin, size, whole);
    for (int k = 0; k < 3; ++k) {
        if (!u.moments[k]) continue;
        if (u.moments_type == kFloat32) {
            values.moments[k] = static_cast<float*>(u.moments[k]) + begin;
        } else {
            values.moments[k] = widened[k];
            widen(static_cast<const uint16_t*>(u.moments[k]) + begin, widened[k], size, u.moments_type);
        }
    }
    if (u.gradient_type == kFloat32) {
        std::memcpy(gradient, static_cast<const float*>(u.gradient) + begin, size * sizeof(float));
    } else {
        widen(static_cast<const uint16_t*>(u.gradient) + begin, gradient, size, u.gradient_type);
    }
    const float* __restrict master = values.master;
    const Settings s = u.settings;
    if (s.num_factors && s.weight_decay != 0) {
        for (int64_t i = 0; i < size; ++i) gradient[i] = add_decay(s, scale_gradient(s, gradient[i]), master[i]);
    } else if (s.num_factors) {
        for (int64_t i = 0; i < size; ++i) gradient[i] = scale_gradient(s, gradient[i]);
    } else if (s.weight_decay != 0) {
        for (int64_t i = 0; i < size; ++i) gradient[i] = add_decay(s, gradient[i], master[i]);
    }

    if (u.rule == kAdam) {
        is_tail ? step_adam_block<true>(u, values, size) : step_adam_block<false>(u, values, size);
    } else {
        is_tail ? step_sgd_block<true>(u, values, size) : step_sgd_block<false>(u, values, size);
    }

    for (int k = 0; k < 3 && u.moments_type != kFloat32; ++k) {
        if (!u.moments[k]) continue;
        uint16_t* const moment = static_cast<uint16_t*>(u.moments[k]) + begin;
        if (u.turn >= 0) {
            round_by_turns(widened[k], moment, begin, size, u.turn);
        } else {
            narrow(widened[k], moment, size, u.moments_type);
        }
    }
    if (!u.master) return split_block(u, begin, size, whole, update, found);
    if (u.narrow && u.narrow_type == kFloat32) {
        std::memcpy(static_cast<float*>(u.narrow) + begin, u.master + begin, size * sizeof(float));
    } else if (is_past) {
        alignas(kLine) uint16_t rounded[kBlock];
        narrow(u.master + begin, rounded, kBlock, u.narrow_type);  // a length that the compiler knows, as in `fetch`
        copy_past_cache<kBlock>(rounded, static_cast<uint16_t*>(u.narrow) + begin);
    } else if (u.narrow) {
        narrow(u.master + begin, static_cast<uint16_t*>(u.narrow) + begin, size, u.narrow_type);
    }
    return false;
}

// Whether `step_spans` steps it: the weight is whole, and crosses the link in bfloat16 (kNarrow) or as it is.
template <bool kNarrow>
bool has_spans(const Update& u) {
    const bool crosses = kNarrow ? goes_past_cache(u) && u.narrow_type == kBFloat16 : !u.narrow;
    const bool has_types = u.master && u.moments_type == kFloat32 && u.gradient_type == (kNarrow ? kBFloat16 : kFloat32);
    return is_plain_adam(u) && has_types && crosses;
}

// As `step_block`, in one loop from gradient to narrow weight, so that divisions and memory wait for each other least.
// Return where the last whole span ends. It widens and finishes gradients by itself: with a function shared with
// `step_block` it took 1.08 times as long.
template <bool kNarrow>
int64_t step_spans(const Update& u, int64_t begin, int64_t end) {
    using Given = std::conditional_t<kNarrow, uint16_t, float>;
    const Given* __restrict given = static_cast<const Given*>(u.gradient);
    float* __restrict master = u.master;
    float* __restrict first = static_cast<float*>(u.moments[0]);
    float* __restrict second = static_cast<float*>(u.moments[1]);
    const Settings s = u.settings;
    for (; begin + kSpan <= end; begin += kSpan) {
        fetch_bytes<kSpan * sizeof(Given)>(reinterpret_cast<const char*>(given + begin + kAheadOfSpan));
        for (const float* values : {master, first, second}) {
            fetch_bytes<kSpan * sizeof(float)>(reinterpret_cast<const char*>(values + begin + kAheadOfSpan));
        }
        float gradient[kSpan], none;
        alignas(kLine) uint16_t rounded[kSpan];
        for (int64_t i = 0; i < kSpan; ++i) {
            if constexpr (kNarrow) {
                gradient[i] = from_bfloat16(given[begin + i]);
            } else {
                gradient[i] = given[begin + i];
            }
        }
        if (s.num_factors) {
            for (int64_t i = 0; i < kSpan; ++i) gradient[i] = scale_gradient(s, gradient[i]);
        }
        if (s.weight_decay != 0) {
            for (int64_t i = 0; i < kSpan; ++i) gradient[i] = add_decay(s, gradient[i], master[begin + i]);
        }
        for (int64_t i = 0; i < kSpan; ++i) {
            const int64_t k = begin + i;
            step_adam(s, gradient[i], first[k], second[k], none, master[k], true, false, false);
            if constexpr (kNarrow) rounded[i] = to_bfloat16(master[k]);
        }
        if constexpr (kNarrow) copy_past_cache<kSpan>(rounded, static_cast<uint16_t*>(u.narrow) + begin);
    }
    return begin;
}

// While it lives, MKL begins no threads of its own for a block that this thread has in hand.
class Alone {
  public:
    explicit Alone(SetThreads set) : set_(set), before_(set ? set(1) : 0) {}
    ~Alone() {
        if (set_) set_(before_);
    }
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

  private:
    const SetThreads set_;
    const int before_;
};

void step_range(const Update& u, int64_t begin, int64_t end, int32_t update, std::vector<Found>& found) {
    const int64_t tail = u.size - u.tail;
    bool has_nan = false;
    if (has_spans<true>(u)) begin = step_spans<true>(u, begin, std::min(end, tail));
    if (has_spans<false>(u)) begin = step_spans<false>(u, begin, std::min(end, tail));
    while (begin < end) {
        const bool is_tail = begin >= tail;
        const int64_t size = std::min({kBlock, end - begin, is_tail ? end - begin : tail - begin});
        has_nan |= step_block(u, begin, size, is_tail, update, found);
        begin += size;
    }
    if (has_nan) found.push_back({-1, 0, update});
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
void hydra_roots(const float* from, float* to, int64_t size, int32_t refines, RootsOfLibrary of_library) {
    roots(from, to, size, refines, of_library);
}

// Return the size of an update here, which the caller's has to be.
int64_t hydra_update_bytes() { return sizeof(Update); }

// Make all updates, with this many threads: the caller, and those that torch keeps for it. They take units in turn, so
// that one that is slow, or another process on its core, does not hold up the rest. No element depends on their number.
// parallel: null if no library names it. Threads are begun then, and end with the call. Where torch keeps threads,
// those would wait for cores: torch's look for work for some ms after each operation.
// Return a list of what the halves of split weights do not tell, by update and place, and its length; `hydra_take` frees
// it. Null: there is nothing. set_threads: of the library that takes roots; null: none does.
void hydra_update(const Update* updates, int64_t num_updates, int64_t num_threads, Parallel parallel,
                  SetThreads set_threads, void** list, int64_t* num_found) {
    std::vector<int64_t> ends(num_updates);  // of each update's units, counted over all of them
    int64_t num_units = 0;
    for (int64_t k = 0; k < num_updates; ++k) ends[k] = num_units += (updates[k].size + kUnit - 1) / kUnit;
    std::atomic<int64_t> next{0};
    std::vector<Found> found;
    std::mutex mutex;
    auto work = [&] {
        const Alone alone(set_threads);
        std::vector<Found> mine;
        for (int64_t unit = next++; unit < num_units; unit = next++) {
            const auto k = std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin();
            const int64_t begin = (unit - (k ? ends[k - 1] : 0)) * kUnit;
            step_range(updates[k], begin, std::min(begin + kUnit, updates[k].size), static_cast<int32_t>(k), mine);
        }
        end_writes();
        const std::lock_guard<std::mutex> lock(mutex);
        found.insert(found.end(), mine.begin(), mine.end());
    };
    if (parallel && std::min(num_threads, num_units) > 1) {
        // As many as torch asks for, even for fewer units: of a smaller team the library would end the others.
        const auto call = [](void* own) { (*static_cast<decltype(work)*>(own))(); };
        parallel(call, &work, static_cast<unsigned>(num_threads), 0);
    } else {
        std::vector<std::thread> team;
        try {
            while (static_cast<int64_t>(team.size()) + 1 < std::min(num_threads, num_units)) team.emplace_back(work);
        } catch (const std::system_error&) {  // the system gives no more threads: those there are do it
        }
        work();
        for (auto& thread : team) thread.join();
    }
    std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
        return std::tie(a.update, a.place) < std::tie(b.update, b.place);
    });
    *num_found = static_cast<int64_t>(found.size());
    *list = found.empty() ? nullptr : new std::vector<Found>(std::move(found));
}

// Copy a list that an update returned to a place as long, and free it.
void hydra_take(void* list, Found* to) {
    auto* const found = static_cast<std::vector<Found>*>(list);
    std::copy(found->begin(), found->end(), to);
    delete found;
}

}  // extern "C"
