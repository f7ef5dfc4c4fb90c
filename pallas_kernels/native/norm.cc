// Rows over the root of their mean square: XLA:CPU makes four small programs of each norm.

#include <cmath>

#include "vectors.h"

namespace {

constexpr int64_t kTaskValues = 16 << 10;

template <typename T>
float sum_of_squares(const T* x, int64_t count) {
  Floats total = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats values = widened(x + i);
    total += values * values;
  }
  float rest = 0;
  for (; i < count; ++i) rest += widen(x[i]) * widen(x[i]);
  return sum(total) + rest;
}

// Writes `w * (x / rms(x))`; both factors are rounded to T before the product, as `reference` does.
template <typename T>
void norm_row(const T* x, const T* w, T* out, int64_t count, float eps) {
  const float factor = 1 / std::sqrt(sum_of_squares(x, count) / float(count) + eps);
  for (int64_t i = 0; i < count; ++i) {
    T normed;
    store(widen(x[i]) * factor, &normed);
    store(widen(w[i]) * widen(normed), out + i);
  }
}

template <typename T>
ffi::Error norm_rows(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const T* w, T* out, float eps) {
  const int64_t D = x.dimensions().back(), rows = x.element_count() / std::max<int64_t>(1, D);
  const int64_t each = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, D)), tasks = (rows + each - 1) / each;
  for_each(pool, tasks, tasks, [&](int64_t task) {
    for (int64_t row = task * each; row < std::min(rows, (task + 1) * each); ++row) {
      norm_row(data<T>(x) + row * D, w, out + row * D, D, eps);
    }
  });
  return ffi::Error::Success();
}

// x [..., D], w [L, D] of the same type, layer -> [..., D].
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                    ffi::Result<ffi::AnyBuffer> out, float eps) {
  if (x.element_type() != w.element_type()) return wrong("x and w are of different types");
  const int64_t index = std::clamp<int64_t>(*layer.typed_data(), 0, w.dimensions()[0] - 1) * w.dimensions()[1];
  if (x.element_type() == ffi::F32) return norm_rows(pool, x, data<float>(w) + index, data<float>(out), eps);
  if (x.element_type() == ffi::BF16) return norm_rows(pool, x, data<BFloat16>(w) + index, data<BFloat16>(out), eps);
  return wrong("no norm of this type");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RmsNorm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
