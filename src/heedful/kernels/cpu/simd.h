// The vector words that the kernels are written in, and how each storage type is read into them.
// Compiled once per instruction set inside its own namespace: nothing here may be shared between two of them.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FLAT __attribute__((always_inline))
#define INLINE FLAT inline
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace heedful::HEEDFUL_ISA {

constexpr int W = VECTOR_BYTES / 4;  // 32-bit lanes of a vector

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));  // as many halves as vf has lanes
typedef uint8_t vb __attribute__((vector_size(VECTOR_BYTES / 4)));   // as many bytes as vf has lanes
typedef float v4 __attribute__((vector_size(16)));

template <class V>
INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}
// The first `bytes` of a vector, zeros behind: never touches memory beyond the row.
template <class V>
INLINE V load_part(const void* p, int bytes) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(V) == 64)
    return (V)_mm512_maskz_loadu_epi8(bytes >= 64 ? ~0ull : (1ull << bytes) - 1, p);
#endif
  V v{};
  memcpy(&v, p, bytes);
  return v;
}
INLINE vf splat(float x) { return x - vf{}; }  // not 0 + x, which is an addition: it makes -0 a 0
// a > b ? a : b, so that a NaN in b stays; on x86 one instruction, which a compiler may not make of the words
#if defined(__AVX512F__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps(a, b); }
#elif defined(__AVX2__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps(a, b); }
#elif defined(__x86_64__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm_max_ps(a, b); }
#else
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
#endif
INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

INLINE vi iota() {
  vi v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

// A softmax vector holds four neighbouring keys for each of kRows query rows: row = 128-bit lane, key = element.
constexpr int kRows = W / 4;

// Sums of kRows x 4 vectors, sum[row][key], as one softmax vector. Rows from R on are left zero.
#if defined(__AVX512F__)
// (a's lower half + its upper half, b's upper half + its lower half), at three grains: one shuffle and one blend each
INLINE vf fold_halves(vf a, vf b) { return _mm512_mask_blend_ps(0xff00, a, b) + (vf)_mm512_shuffle_f32x4(a, b, 0x4e); }
INLINE vf fold_lanes(vf a, vf b) {
  return _mm512_mask_blend_ps(0xf0f0, a, b) + (vf)_mm512_permutex2var_ps(a, (__m512i)(vi{4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27}), b);
}
INLINE vf fold_pairs(vf a, vf b) {
  return _mm512_mask_blend_ps(0xcccc, a, b) + (vf)_mm512_shuffle_pd((__m512d)a, (__m512d)b, 0x55);
}
INLINE vf fold_singles(vf a, vf b) {
  return (vf)_mm512_shuffle_ps(a, b, 0x88) + (vf)_mm512_shuffle_ps(a, b, 0xdd);
}
template <int R>
INLINE vf reduce_rows(const vf (*sum)[4]) {
  auto row = [&](int r, int k) FLAT { return r < R ? sum[r][k] : vf{}; };
  vf key[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++)  // lanes become rows 0 1 2 3
    key[k] = fold_lanes(fold_halves(row(0, k), row(2, k)), fold_halves(row(1, k), row(3, k)));
  return fold_singles(fold_pairs(key[0], key[1]), fold_pairs(key[2], key[3]));
}
#elif defined(__AVX2__)
template <int R>
INLINE vf reduce_rows(const vf (*sum)[4]) {
  __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(sum[0][0], sum[0][1]), _mm256_hadd_ps(sum[0][2], sum[0][3]));
  __m256 y = R < 2 ? _mm256_setzero_ps()
                   : _mm256_hadd_ps(_mm256_hadd_ps(sum[R - 1][0], sum[R - 1][1]), _mm256_hadd_ps(sum[R - 1][2], sum[R - 1][3]));
  return (vf)_mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
#else
template <int R>
INLINE vf reduce_rows(const vf (*sum)[4]) {
  vf ab = __builtin_shufflevector(sum[0][0], sum[0][1], 0, 4, 1, 5) + __builtin_shufflevector(sum[0][0], sum[0][1], 2, 6, 3, 7);
  vf cd = __builtin_shufflevector(sum[0][2], sum[0][3], 0, 4, 1, 5) + __builtin_shufflevector(sum[0][2], sum[0][3], 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
#endif
// The maximum (sum) of each lane's four elements, in all four of them.
template <class F>
INLINE vf lane_fold(vf v, F f) {
#if defined(__AVX512F__)
  v = f(v, (vf)_mm512_permute_ps(v, 0x4e));
  return f(v, (vf)_mm512_permute_ps(v, 0xb1));
#elif defined(__AVX2__)
  v = f(v, (vf)_mm256_permute_ps(v, 0x4e));
  return f(v, (vf)_mm256_permute_ps(v, 0xb1));
#else
  v = f(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  return f(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
#endif
}
INLINE vf lane_max(vf v) { return lane_fold(v, [](vf a, vf b) FLAT { return vmax(a, b); }); }
INLINE vf lane_sum(vf v) { return lane_fold(v, [](vf a, vf b) FLAT { return a + b; }); }
INLINE float hmax(vf v) {
  v = lane_max(v);
  float most = v[0];
  for (int i = 4; i < W; i += 4) most = v[i] > most ? v[i] : most;
  return most;
}
INLINE float hsum(vf v) {
  v = lane_sum(v);
  float total = v[0];
  for (int i = 4; i < W; i += 4) total += v[i];
  return total;
}
INLINE bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#else
  return mask[0] | mask[1] | mask[2] | mask[3];
#endif
}

// ---- squares
#if defined(__AVX512F__)
// 16 x 16 words: row i of r becomes column i
INLINE void transpose(vi* r) {
  __m512i t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      u[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      u[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x44), b = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xee), d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xee);
    r[j] = (vi)_mm512_shuffle_i32x4(a, b, 0x88);
    r[4 + j] = (vi)_mm512_shuffle_i32x4(a, b, 0xdd);
    r[8 + j] = (vi)_mm512_shuffle_i32x4(c, d, 0x88);
    r[12 + j] = (vi)_mm512_shuffle_i32x4(c, d, 0xdd);
  }
}
#else
INLINE void transpose(vi* r) {
  int32_t flat[W][W];
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) flat[j][i] = r[i][j];
  memcpy((void*)r, flat, sizeof flat);
}
#endif

// ---- exp2 and tanh
// The product as it rounds by itself, kept from being fused into what follows.
INLINE vf rounded(vf x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}
// 2^x for x <= 0: to 2e-7, exactly 1 at 0, exactly 0 below -126. Short, for weights that become bf16: to 2e-6, and no
// more than 2^-126 below -126, which bf16 products take for 0.
template <bool Short = false>
INLINE vf exp2v(vf x) {
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf y = vmax(splat(Short ? -127.f : -126.f), x);  // in this order NaN stays
  const vf k = y + magic;
  const vf f = y - (k - magic);
  vf p;
  if constexpr (Short) {
    p = splat(9.57008873e-3f);
    p = p * f + 5.59178596e-2f;
    p = p * f + .240247452f;
    p = p * f + .693121815f;
  } else {
    p = splat(1.53457974e-4f);
    p = p * f + 1.33999311e-3f;
    p = p * f + 9.61848901e-3f;
    p = p * f + 5.55032878e-2f;
    p = p * f + .240226469f;
    p = p * f + .693147206f;
  }
  p = p * f + 1.f;
  vf r = (vf)((vi)p + ((vi)k << 23));
  return Short ? r : x < splat(-126.f) ? vf{} : r;
}
// tanh: near 0 an odd polynomial, else (1 - e) / (1 + e) with e = exp(-2|x|), which is only worked out where a lane
// needs it: soft caps are far above most scores. Short: to 1e-5, for weights that become bf16.
template <bool Short = false>
INLINE vf tanhv(vf x) {
  constexpr float near = Short ? .4f : .625f;
  const vf z = x * x;
  vf p;
  if constexpr (Short) {
    p = splat(.122112862f);
    p = p * z + -.332789567f;
    p = (p * z + 1.f) * x;
  } else {
    p = splat(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z + -5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z + -3.33332819422e-1f;
    p = p * z * x + x;
  }
  const vi is_near = z < splat(near * near);  // a NaN is not
  if (__builtin_expect(!any(~is_near), 1)) return p;
  const vf e = exp2v<Short>(vabs(x) * splat(-2.f * 1.44269504f));
  const vf far = (1.f - e) / (1.f + e);
  return is_near ? p : (vf)((vi)far | ((vi)x & (int32_t)0x80000000));
}

// ---- storage types: how a vector of W elements is read as floats, and written
// W halves as 32-bit words, the low halves of W words, W bytes as halves, W words below 256 as bytes. Compilers split these
// conversions, those of bytes into single ones, where an instruction or two do.
INLINE vu words(vh h) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, vu);
#endif
}
INLINE vh halves(vu x) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
  return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(x & 0xffff), (__m256i)x), 0x08));
#elif defined(__SSE2__)
  const __m128i low = _mm_srai_epi32(_mm_slli_epi32((__m128i)x, 16), 16);  // as signed, for a pack that saturates
  return (vh)_mm_cvtsi128_si64(_mm_packs_epi32(low, low));
#else
  return __builtin_convertvector(x, vh);
#endif
}
INLINE vh halves(vb b) {
#if defined(__AVX512F__)
  return (vh)_mm256_cvtepu8_epi16((__m128i)b);
#elif defined(__AVX2__)
  return (vh)_mm_cvtepu8_epi16(_mm_cvtsi64_si128((int64_t)b));
#else
  return __builtin_convertvector(b, vh);
#endif
}
INLINE vb bytes(vu x) {
#if defined(__AVX512F__)
  return (vb)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  return (vb)_mm_cvtsi128_si64(_mm_packus_epi16((__m128i)halves(x), (__m128i)halves(x)));
#else
  return __builtin_convertvector(x, vb);
#endif
}
struct F32 {
  static constexpr int size = 4;
  static INLINE vf read(const void* p) { return load<vf>(p); }
  static INLINE vf read_part(const void* p, int n) { return load_part<vf>(p, n * 4); }
  static INLINE void write(void* p, vf v) { store(p, v); }
};
struct BF16 {
  static constexpr int size = 2;
  static INLINE vf widen(vh h) { return (vf)(words(h) << 16); }
  static INLINE vf read(const void* p) { return widen(load<vh>(p)); }
  static INLINE vf read_part(const void* p, int n) { return widen(load_part<vh>(p, n * 2)); }
  static INLINE vh narrow(vf v) {  // to nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh(v);
#endif
    vu b = (vu)v;
    vu r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    vu nan = (b >> 16) | 0x40;
    return halves((b & 0x7fffffff) > 0x7f800000 ? nan : r);
  }
  static INLINE void write(void* p, vf v) { store(p, narrow(v)); }
};
struct F16 {
  static constexpr int size = 2;
  static INLINE vf widen(vh h) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    // exponent and fraction moved into place are 2^-112 too small; infinities and NaN get the top exponent
    vu x = words(h);
    vf magnitude = (vf)((x & 0x7fff) << 13) * splat(5.192296858534828e33f);
    vu top = (x & 0x7c00) == 0x7c00 ? vu{} + 0x7f800000 : vu{};
    return (vf)((vu)magnitude | top | ((x & 0x8000) << 16));
#endif
  }
  static INLINE vf read(const void* p) { return widen(load<vh>(p)); }
  static INLINE vf read_part(const void* p, int n) { return widen(load_part<vh>(p, n * 2)); }
  static INLINE vh narrow(vf v) {
#if defined(__AVX512F__)
    return (vh)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    return (vh)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vu b = (vu)v, sign = (b >> 16) & 0x8000, m = b & 0x7fffffff;
    vu normal = (m - 0x38000000 + 0xfff + ((m >> 13) & 1)) >> 13;
    vu small = (vu)((vf)m + splat(0.5f)) - 0x3f000000;  // the addition rounds to multiples of 2^-24
    vu r = m < 0x38800000 ? small : normal;
    r = m >= 0x477ff000 ? vu{} + 0x7c00 : r;
    r = m > 0x7f800000 ? vu{} + 0x7e00 : r;
    return halves(r | sign);
#endif
  }
  static INLINE void write(void* p, vf v) { store(p, narrow(v)); }
};
// An e5m2 byte is the high byte of an fp16.
struct E5M2 {
  static constexpr int size = 1;
  static INLINE vf widen(vb b) { return F16::widen(halves(b) << 8); }
  static INLINE vf read(const void* p) { return widen(load<vb>(p)); }
  static INLINE vf read_part(const void* p, int n) { return widen(load_part<vb>(p, n)); }
};
// An e4m3fn byte with its fields moved into an fp16's places is 2^-8 too small; its one NaN is 0x7f.
struct E4M3 {
  static constexpr int size = 1;
  static INLINE vf widen(vb b) {
    const vh h = halves(b), nan = (h & 0x7f) == 0x7f ? vh{} + 0x7e00 : vh{};
    return F16::widen(((h & 0x80) << 8) | ((h & 0x7f) << 7) | nan) * splat(256.f);
  }
  static INLINE vf read(const void* p) { return widen(load<vb>(p)); }
  static INLINE vf read_part(const void* p, int n) { return widen(load_part<vb>(p, n)); }
};

}  // namespace heedful::HEEDFUL_ISA
