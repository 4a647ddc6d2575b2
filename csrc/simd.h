// Vectors of the instruction set that the including file is compiled for: AVX-512 (BF16, VNNI, VBMI), AVX2 with FMA,
// or what the compiler makes of four lanes (SSE2, NEON, anything).
//
// Everything here is a pure function of its lanes, so that a row's value never depends on what is beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace FOREDRAFT_ISA {
namespace {

inline float widen(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)

constexpr int W = 16;
using VF = __m512;
using VI = __m512i;
using Pairs = __m512bh;  // W pairs of bfloat16

inline VF load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, VF v) { _mm512_storeu_ps(p, v); }
inline VF set(float v) { return _mm512_set1_ps(v); }
inline VF add(VF a, VF b) { return _mm512_add_ps(a, b); }
inline VF sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
inline VF mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
inline VF div(VF a, VF b) { return _mm512_div_ps(a, b); }
inline VF madd(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
inline VF max(VF a, VF b) { return _mm512_max_ps(a, b); }
inline VF abs(VF a) { return _mm512_abs_ps(a); }
inline VI round(VF a) { return _mm512_cvtps_epi32(a); }
inline VF to_float(VI a) { return _mm512_cvtepi32_ps(a); }
inline VI seti(int v) { return _mm512_set1_epi32(v); }
inline VI addi(VI a, VI b) { return _mm512_add_epi32(a, b); }
inline VF power_of_two(VI e) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(e, seti(127)), 23)); }
// b where a < limit, else c.
inline VF select_less(VF a, VF limit, VF b, VF c) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, limit, _CMP_LT_OQ), c, b);
}
inline VF load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline void store_bf16(uint16_t* p, VF v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
inline void store_int8(int8_t* p, VI v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
// 2^(byte - 127); byte 0, which would be subnormal, gives 0.
inline VF load_e8m0(const uint8_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 23));
}

inline Pairs load_pairs(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline Pairs set_pairs(const uint16_t* p) {
    int pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}
inline VF dot(VF acc, Pairs a, Pairs b) { return _mm512_dpbf16_ps(acc, a, b); }

inline VI load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline VI set_quad(const int8_t* p) {
    int quad;
    std::memcpy(&quad, p, 4);
    return _mm512_set1_epi32(quad);
}
template <bool small>
inline VI dot(VI acc, VI unsigned_bytes, VI signed_bytes) {
    return _mm512_dpbusd_epi32(acc, unsigned_bytes, signed_bytes);
}

// A table of 16 bytes, and its values at the low and at the high nibbles of 4 * W bytes. Only six bits of an index
// count here, so the table is repeated four times and the rest of the byte need not be masked.
struct ByteTable {
    __m512i entries;
    explicit ByteTable(const uint8_t* p)
        : entries(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) {}
    VI low(VI v) const { return _mm512_permutexvar_epi8(v, entries); }
    VI high(VI v) const { return _mm512_permutexvar_epi8(_mm512_srli_epi16(v, 4), entries); }
};

// Nibble `index` of each of 2 * W words, looked up among 16 bfloat16 values.
struct WordTable {
    __m512i entries;
    explicit WordTable(const uint16_t* p)
        : entries(_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))) {}
    template <int index>
    Pairs at(const uint8_t* words) const {
        const __m512i v = _mm512_loadu_si512(words);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4 * index), entries);
    }
};

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Without a place in the last cache, which is left to what comes back sooner.
inline void prefetch_once(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA); }

#elif defined(__AVX2__)

constexpr int W = 8;
using VF = __m256;
using VI = __m256i;
struct Pairs {
    __m256 low, high;
};

inline VF load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, VF v) { _mm256_storeu_ps(p, v); }
inline VF set(float v) { return _mm256_set1_ps(v); }
inline VF add(VF a, VF b) { return _mm256_add_ps(a, b); }
inline VF sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
inline VF mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
inline VF div(VF a, VF b) { return _mm256_div_ps(a, b); }
inline VF madd(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
inline VF max(VF a, VF b) { return _mm256_max_ps(a, b); }
inline VF abs(VF a) { return _mm256_andnot_ps(set(-0.0f), a); }
inline VI round(VF a) { return _mm256_cvtps_epi32(a); }
inline VF to_float(VI a) { return _mm256_cvtepi32_ps(a); }
inline VI seti(int v) { return _mm256_set1_epi32(v); }
inline VI addi(VI a, VI b) { return _mm256_add_epi32(a, b); }
inline VF power_of_two(VI e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, seti(127)), 23)); }
inline VF select_less(VF a, VF limit, VF b, VF c) {
    return _mm256_blendv_ps(c, b, _mm256_cmp_ps(a, limit, _CMP_LT_OQ));
}
inline VF load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline void store_bf16(uint16_t* p, VF v) {
    float values[W];
    store(values, v);
    for (int i = 0; i < W; ++i) p[i] = narrow(values[i]);
}
inline void store_int8(int8_t* p, VI v) {
    int values[W];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), v);
    for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(values[i]);
}
inline VF load_e8m0(const uint8_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 23));
}

inline Pairs split(VI v) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(v, seti(static_cast<int>(0xffff0000u))))};
}
inline Pairs load_pairs(const uint16_t* p) { return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Pairs set_pairs(const uint16_t* p) { return {set(widen(p[0])), set(widen(p[1]))}; }
inline VF dot(VF acc, Pairs a, Pairs b) { return madd(a.high, b.high, madd(a.low, b.low, acc)); }

inline VI load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline VI set_quad(const int8_t* p) {
    int quad;
    std::memcpy(&quad, p, 4);
    return seti(quad);
}
// The byte product saturates at 16 bits: it serves for unsigned values up to 128 only.
template <bool small>
inline VI dot(VI acc, VI unsigned_bytes, VI signed_bytes) {
    if constexpr (small) {
        const VI words = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
        return addi(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    }
    const VI low = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(unsigned_bytes)),
                                     _mm256_cvtepi8_epi16(_mm256_castsi256_si128(signed_bytes)));
    const VI high = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_extracti128_si256(unsigned_bytes, 1)),
                                      _mm256_cvtepi8_epi16(_mm256_extracti128_si256(signed_bytes, 1)));
    return addi(acc, _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8));
}

struct ByteTable {
    __m256i entries;
    explicit ByteTable(const uint8_t* p)
        : entries(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) {}
    VI low(VI v) const { return _mm256_shuffle_epi8(entries, _mm256_and_si256(v, _mm256_set1_epi8(15))); }
    VI high(VI v) const { return low(_mm256_srli_epi16(v, 4)); }
};

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_once(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA); }

#else

constexpr int W = 4;
typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
struct Pairs {
    VF low, high;
};

inline VF load(const float* p) {
    VF v;
    std::memcpy(&v, p, 16);
    return v;
}
inline void store(float* p, VF v) { std::memcpy(p, &v, 16); }
inline VF set(float v) { return VF{v, v, v, v}; }
inline VF add(VF a, VF b) { return a + b; }
inline VF sub(VF a, VF b) { return a - b; }
inline VF mul(VF a, VF b) { return a * b; }
inline VF div(VF a, VF b) { return a / b; }
#if defined(__ARM_NEON) && defined(__aarch64__)
inline VF madd(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
inline VF madd(VF a, VF b, VF c) { return a * b + c; }
#endif
inline VF blend(VI mask, VF b, VF c) { return (VF)((mask & (VI)b) | (~mask & (VI)c)); }
inline VF max(VF a, VF b) { return blend((VI)(a > b), a, b); }
inline VI seti(int v) { return VI{v, v, v, v}; }
inline VI addi(VI a, VI b) { return a + b; }
inline VF abs(VF a) { return (VF)((VI)a & seti(0x7fffffff)); }
inline VI round(VF a) {
    return VI{static_cast<int>(std::nearbyintf(a[0])), static_cast<int>(std::nearbyintf(a[1])),
              static_cast<int>(std::nearbyintf(a[2])), static_cast<int>(std::nearbyintf(a[3]))};
}
inline VF to_float(VI a) { return __builtin_convertvector(a, VF); }
inline VF power_of_two(VI e) { return (VF)((e + 127) << 23); }
inline VF select_less(VF a, VF limit, VF b, VF c) { return blend((VI)(a < limit), b, c); }
inline VF load_bf16(const uint16_t* p) { return VF{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
inline void store_bf16(uint16_t* p, VF v) {
    for (int i = 0; i < W; ++i) p[i] = narrow(v[i]);
}
inline void store_int8(int8_t* p, VI v) {
    for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(v[i]);
}
inline VF load_e8m0(const uint8_t* p) { return (VF)(VI{p[0], p[1], p[2], p[3]} << 23); }

inline Pairs load_pairs(const uint16_t* p) {
    VI v;
    std::memcpy(&v, p, 16);
    return {(VF)(v << 16), (VF)(v & seti(static_cast<int>(0xffff0000u)))};
}
inline Pairs set_pairs(const uint16_t* p) { return {set(widen(p[0])), set(widen(p[1]))}; }
inline VF dot(VF acc, Pairs a, Pairs b) { return madd(a.high, b.high, madd(a.low, b.low, acc)); }

inline VI load_bytes(const uint8_t* p) {
    VI v;
    std::memcpy(&v, p, 16);
    return v;
}
inline VI set_quad(const int8_t* p) {
    int32_t quad;
    std::memcpy(&quad, p, 4);
    return seti(quad);
}
template <bool small>
inline VI dot(VI acc, VI unsigned_bytes, VI signed_bytes) {
    const VI low = seti(0xff);
    for (int i = 0; i < 4; ++i) {
        acc += ((unsigned_bytes >> (8 * i)) & low) * ((signed_bytes << (24 - 8 * i)) >> 24);
    }
    return acc;
}

struct ByteTable {
    uint8_t entries[16];
    explicit ByteTable(const uint8_t* p) { std::memcpy(entries, p, 16); }
    VI low(VI v) const { return look_up(v, 0); }
    VI high(VI v) const { return look_up(v, 4); }
    VI look_up(VI v, int shift) const {
        uint8_t bytes[16];
        std::memcpy(bytes, &v, 16);
        for (uint8_t& byte : bytes) byte = entries[(byte >> shift) & 15];
        VI found;
        std::memcpy(&found, bytes, 16);
        return found;
    }
};

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_once(const void* p) { __builtin_prefetch(p, 0, 0); }

#endif

#if !defined(__AVX512F__)
struct WordTable {
    const uint16_t* entries;
    explicit WordTable(const uint16_t* p) : entries(p) {}
    template <int index>
    Pairs at(const uint8_t* words) const {
        uint16_t values[2 * W];
        for (int i = 0; i < 2 * W; ++i) {
            uint16_t word;
            std::memcpy(&word, words + 2 * i, 2);
            values[i] = entries[(word >> (4 * index)) & 15];
        }
        return load_pairs(values);
    }
};
#endif

// Lanes are folded in halves: one fixed order.
#if defined(__AVX512F__)
inline float sum(VF v) { return _mm512_reduce_add_ps(v); }
inline int sum(VI v) { return _mm512_reduce_add_epi32(v); }
inline float largest(VF v) { return _mm512_reduce_max_ps(v); }
inline bool any_nan(VF v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
#else
inline float sum(VF v) {
    float lanes[W];
    store(lanes, v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}
inline int sum(VI v) {
    int32_t lanes[W], total = 0;
    std::memcpy(lanes, &v, sizeof lanes);
    for (int32_t lane : lanes) total += lane;
    return total;
}
inline float largest(VF v) {
    float lanes[W];
    store(lanes, v);
    for (int i = 1; i < W; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
}
inline bool any_nan(VF v) {
    float lanes[W];
    store(lanes, v);
    bool found = false;
    for (float lane : lanes) found |= lane != lane;
    return found;
}
#endif

// e^x for x <= 88, 0 below -87 (so for -inf): 2^n times a polynomial of the rest, relative error below 2e-7.
inline VF exp(VF x) {
    const VF lowest = set(-87.0f);
    const VF bounded = max(x, lowest);
    const VI n = round(mul(bounded, set(1.44269504f)));
    const VF turns = to_float(n);
    VF r = madd(turns, set(-0.693359375f), bounded);
    r = madd(turns, set(2.12194440e-4f), r);
    VF p = set(1.0f / 5040.0f);
    p = madd(p, r, set(1.0f / 720.0f));
    p = madd(p, r, set(1.0f / 120.0f));
    p = madd(p, r, set(1.0f / 24.0f));
    p = madd(p, r, set(1.0f / 6.0f));
    p = madd(p, r, set(0.5f));
    p = madd(p, r, set(1.0f));
    p = madd(p, r, set(1.0f));
    return select_less(x, lowest, set(0.0f), mul(p, power_of_two(n)));
}

}  // namespace
}  // namespace FOREDRAFT_ISA
