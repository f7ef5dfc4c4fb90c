// Products of e4m3 as pairs of bfloat16, on a CPU that looks bytes up in registers and multiplies bfloat16.
//
// bfloat16 holds each value of e4m3. So the products are exact; the sums of 128 of K are float32, and are scaled one by one.

#ifndef DSV3_E4M3_H_
#define DSV3_E4M3_H_

#include "vectors.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define DSV3_E4M3_PAIRS 1

namespace {

constexpr int64_t kPairedBytes = 64;  // values that are decoded at once
constexpr int64_t kScaled = 128;      // values of K that share a scale

// The bits of a value without its sign as bfloat16. NaN, which no checkpoint holds, becomes 480.
inline uint16_t decoded(int bits) {
  const float mantissa = bits & 7;
  const float value = bits < 8 ? mantissa * 0x1p-9f : (8 + mantissa) * 0x1p-10f * (1 << (bits >> 3));
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof(wide));
  return wide >> 16;
}

// Two vectors of bfloat16: the values of 64 bytes, in the order in which the machine interleaves bytes.
struct Pairs {
  __m512i first, second;
};

// The upper and the lower bytes of all 128 magnitudes.
class Decoder {
 public:
  Decoder() {
    alignas(64) uint8_t upper[128], lower[128];
    for (int bits = 0; bits < 128; ++bits) {
      upper[bits] = decoded(bits) >> 8;
      lower[bits] = decoded(bits) & 0xff;
    }
    for (int i = 0; i < 2; ++i) {
      upper_[i] = _mm512_load_si512(upper + 64 * i);
      lower_[i] = _mm512_load_si512(lower + 64 * i);
    }
  }

  inline Pairs operator()(__m512i bytes) const {
    constexpr int kOrMasked = 0xf8;  // a | b & c
    const __m512i magnitude = _mm512_permutex2var_epi8(upper_[0], bytes, upper_[1]);
    const __m512i upper = _mm512_ternarylogic_epi32(magnitude, bytes, _mm512_set1_epi8(-128), kOrMasked);
    const __m512i lower = _mm512_permutex2var_epi8(lower_[0], bytes, lower_[1]);
    return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
  }

 private:
  __m512i upper_[2], lower_[2];
};

// Up to 64 bytes; the rest is zero. The processor does not fetch ahead of masked loads: with them alone a decode step of one
// row took longer.
inline __m512i load_bytes(const E4M3* from, int64_t count) {
  if (count >= kPairedBytes) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi8((__mmask64{1} << count) - 1, from);
}

inline int64_t paired_depth(int64_t depth) { return (depth + kPairedBytes - 1) / kPairedBytes * kPairedBytes; }

// One row of x in the order of `Decoder`, zeros behind its end.
inline void decode_row(const Decoder& decoder, const E4M3* x, int64_t depth, BFloat16* out) {
  for (int64_t k = 0; k < depth; k += kPairedBytes) {
    const Pairs values = decoder(load_bytes(x + k, depth - k));
    std::memcpy(out + k, &values, sizeof(values));
  }
}

// `total[m][c] += sum over b of factors[b][m] * (x[m, 128 of b] * w[c, 128 of b])`, x of `decode_row`; lanes are along K.
template <int M, int C>
inline void scaled_multiply(const Decoder& decoder, const BFloat16* x, const E4M3* w, const float* factors, int64_t rows,
                            Floats (&total)[M][C], const Shape& shape) {
  // Loops over rows and columns are unrolled by name: GCC 12 kept these sums in memory, at a third of the speed.
  for (int64_t begin = 0; begin < shape.depth; begin += kScaled, factors += rows) {
    const int64_t end = std::min(begin + kScaled, shape.depth);
    __m512 block[M][C] = {};
    for (int64_t k = begin; k < end; k += kPairedBytes) {
      __m512i first[C], second[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const E4M3* from = w + c * shape.w_stride + k;
        fetch_ahead(from);
        const Pairs pairs = decoder(load_bytes(from, shape.depth - k));
        first[c] = pairs.first;
        second[c] = pairs.second;
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const BFloat16* from = x + m * shape.x_stride + k;
        const __m512i front = _mm512_loadu_si512(from), back = _mm512_loadu_si512(from + kPairedBytes / 2);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          block[m][c] = _mm512_dpbf16_ps(block[m][c], (__m512bh)front, (__m512bh)first[c]);
          block[m][c] = _mm512_dpbf16_ps(block[m][c], (__m512bh)back, (__m512bh)second[c]);
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) total[m][c] += (Floats)block[m][c] * factors[m];
    }
  }
}

// The products of C rows of w, which come from memory: see `dots`. Rows of x behind the first four find them in a cache.
template <int M, int C, typename O>
inline void scaled_dots(const Decoder& decoder, const BFloat16* x, const E4M3* w, const float* factors, int64_t rows,
                        O* out, const Shape& shape) {
  Floats total[M][C] = {};
  if constexpr (M <= kStreamedRows) {
    for (int c = 0; c < C; ++c) {
      Floats one[M][1] = {};
      scaled_multiply<M, 1>(decoder, x, w + c * shape.w_stride, factors, rows, one, shape);
      for (int m = 0; m < M; ++m) total[m][c] = one[m][0];
    }
  } else {
    scaled_multiply<M, C>(decoder, x, w, factors, rows, total, shape);
  }
  add_lanes(total, out, shape);
}

// Columns `first` to `last` of M rows.
template <int M, typename O>
void scaled_columns(const Decoder& decoder, const BFloat16* x, const E4M3* w, const float* factors, int64_t rows, O* out,
                    const Shape& shape, int64_t first, int64_t last) {
  constexpr int C = M > 2 ? 2 : 4;  // two sums per row and column, and the tables, in 32 registers
  int64_t n = first;
  for (; n + C <= last; n += C) {
    scaled_dots<M, C>(decoder, x, w + n * shape.w_stride, factors, rows, out + n, shape);
  }
  for (; n < last; ++n) scaled_dots<M, 1>(decoder, x, w + n * shape.w_stride, factors, rows, out + n, shape);
}

}  // namespace

#endif
#endif  // DSV3_E4M3_H_
