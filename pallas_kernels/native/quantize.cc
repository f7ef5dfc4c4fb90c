// Rounds rows to block-scaled e4m3, as products of e4m3 take them. XLA:CPU converts to e4m3 value by value.

#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t kScaled = 128;  // values of K that share a scale
constexpr int64_t kTaskRows = 8;
constexpr int64_t kHelpedBytes = 64 << 10;  // float32 values per further thread
constexpr float kLargest = 448;
constexpr float kFloor = 1e-4f;  // of the largest magnitude of a block

typedef uint8_t Octets __attribute__((vector_size(kVectorBytes / 4)));

inline Floats magnitudes(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

// To the nearest, ties to even, of magnitudes up to 448.
inline Octets rounded(Floats x) {
  const Words bits = (Words)magnitudes(x), sign = (Words)x >> 24 & 0x80u;
  const Words normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);  // 120: of the exponents' offsets
  const Floats unit = (Floats)(Words{} + 0x46800000u);  // 2^14, whose last bit is 2^-9, the smallest e4m3
  const Words small = (Words)(magnitudes(x) + unit) - 0x46800000u;
  const Words is_small = (Words)(bits < 0x3c800000u);  // 2^-6
  return __builtin_convertvector((small & is_small) | (normal & ~is_small) | sign, Octets);
}

// One block of up to 128 values; returns its scale, which is NaN where a value is.
inline float round_block(const float* x, int64_t count, bool power_of_two, uint8_t* out) {
  Floats values[kScaled / kLanes] = {}, top = {};
  Words nan = {};
  std::memcpy(values, x, count * sizeof(float));
  for (const Floats& each : values) {
    const Floats found = magnitudes(each);
    top = found > top ? found : top;
    nan |= (Words)(each != each);
  }
  float largest = 0;
  uint32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    largest = std::max(largest, top[lane]);
    any |= nan[lane];
  }
  float scale = std::max(largest, kFloor) / kLargest;
  if (power_of_two) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof(bits));
    bits = (bits + 0x7fffffu) & ~0x7fffffu;
    std::memcpy(&scale, &bits, sizeof(bits));
  }
  const float factor = 1 / scale;
  uint8_t made[kScaled];
  for (int64_t i = 0; i < kScaled / kLanes; ++i) {
    Floats scaled = values[i] * factor;
    scaled = scaled > kLargest ? Floats{} + kLargest : scaled;  // rounding of the scale may push the largest past it
    scaled = scaled < -kLargest ? Floats{} - kLargest : scaled;
    const Octets bytes = rounded(scaled);
    std::memcpy(made + i * kLanes, &bytes, sizeof(bytes));
  }
  std::memcpy(out, made, count);
  return any ? std::numeric_limits<float>::quiet_NaN() : scale;
}

// x [G, M, K] -> values [G, M, K] e4m3, scales [G, K / 128, M].
ffi::Error quantize_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Result<ffi::AnyBuffer> values,
                         ffi::ResultBuffer<ffi::F32> scale, bool power_of_two) {
  const int64_t M = x.dimensions()[1], K = x.dimensions()[2], rows = x.dimensions()[0] * M;
  const int64_t blocks = (K + kScaled - 1) / kScaled;
  const float* from = x.typed_data();
  uint8_t* out = data<uint8_t>(values);
  float* scales = scale->typed_data();
  for_each(pool, (rows + kTaskRows - 1) / kTaskRows, int64_t(x.size_bytes()) / kHelpedBytes, [&](int64_t task) {
    for (int64_t row = task * kTaskRows; row < std::min(rows, (task + 1) * kTaskRows); ++row) {
      float* to = scales + row / M * blocks * M + row % M;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = row * K + b * kScaled;
        to[b * M] = round_block(from + at, std::min(kScaled, K - b * kScaled), power_of_two, out + at);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeRows, quantize_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("power_of_two"));
