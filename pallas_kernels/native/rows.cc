// What is done to rows between their products: XLA:CPU makes four small programs of a norm, and as many of a rotation.

#include <cmath>

#include "attention.h"

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

// Writes `w * (x / rms(x))`; both factors are rounded to T before the product, as in `rows.py`.
template <typename T>
void norm_row(const T* x, const T* w, T* out, int64_t count, float eps) {
  const float factor = 1 / std::sqrt(sum_of_squares(x, count) / float(count) + eps);
  for (int64_t i = 0; i < count; ++i) {
    T normed;
    store(widen(x[i]) * factor, &normed);
    store(widen(w[i]) * widen(normed), out + i);
  }
}

// Turns `pairs` pairs of neighbours by their angles.
template <typename T>
void rotate_row(const T* x, const float* cos, const float* sin, T* out, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float even = widen(x[2 * i]), odd = widen(x[2 * i + 1]);
    store(even * cos[i] - odd * sin[i], out + 2 * i);
    store(odd * cos[i] + even * sin[i], out + 2 * i + 1);
  }
}

// Writes `silu(gate) * up` of `count` values each, one behind the other.
template <typename T>
void swiglu_row(const T* x, T* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = std::min<int64_t>(kLanes, count - i);
    float gate[kLanes] = {}, up[kLanes] = {};
    for (int64_t j = 0; j < left; ++j) gate[j] = widen(x[i + j]), up[j] = widen(x[count + i + j]);
    const Floats g = load<Floats>(gate), u = load<Floats>(up);
    const Floats e = exp_of(g < 0 ? g : -g);  // of -|g|: sigmoid is 1 / (1 + e) or e / (1 + e)
    const Floats made = g * ((g < 0 ? e : Floats{} + 1.0f) / (1.0f + e)) * u;
    for (int64_t j = 0; j < left; ++j) store(made[j], out + i + j);
  }
}

// Calls `row(n)` for all rows of `width` values, some thousand values per task.
template <typename Row>
ffi::Error each_row(ffi::ThreadPool& pool, int64_t rows, int64_t width, const Row& row) {
  const int64_t some = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, width)), tasks = (rows + some - 1) / some;
  for_each(pool, tasks, tasks, [&](int64_t task) {
    for (int64_t n = task * some; n < std::min(rows, (task + 1) * some); ++n) row(n);
  });
  return ffi::Error::Success();
}

template <typename T>
const T* layer_of(const ffi::AnyBuffer& stack, const ffi::Buffer<ffi::S32>& layer) {
  const int64_t index = std::clamp<int64_t>(*layer.typed_data(), 0, stack.dimensions()[0] - 1);
  return data<T>(stack) + index * stack.dimensions()[1];
}

// The first D values of rows x [..., D or more], w [L, D] of the same type, layer -> [..., D].
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                    ffi::Result<ffi::AnyBuffer> out, float eps) {
  return with_type(x, w, [&](auto type) {
    typedef decltype(type) T;
    const int64_t D = w.dimensions()[1], stride = x.dimensions().back();
    const T* weights = layer_of<T>(w, layer);
    return each_row(pool, out->element_count() / D, D, [&](int64_t n) {
      norm_row(data<T>(x) + n * stride, weights, data<T>(out) + n * D, D, eps);
    });
  });
}

// gate_up [..., 2 * F] -> [..., F].
ffi::Error swiglu(ffi::ThreadPool pool, ffi::AnyBuffer gate_up, ffi::Result<ffi::AnyBuffer> out) {
  return with_type(gate_up, gate_up, [&](auto type) {
    typedef decltype(type) T;
    const int64_t F = out->dimensions().back();
    return each_row(pool, out->element_count() / F, F, [&](int64_t n) {
      swiglu_row(data<T>(gate_up) + 2 * n * F, data<T>(out) + n * F, F);
    });
  });
}

// x [T, H, W], cosines and sines [T, P / 2] -> [T, H, W]: the last P values of each head are rotated.
ffi::Error rotate_heads(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                        ffi::Result<ffi::AnyBuffer> out) {
  return with_type(x, x, [&](auto type) {
    typedef decltype(type) T;
    const int64_t H = x.dimensions()[1], W = x.dimensions()[2], pairs = cos.dimensions()[1], plain = W - 2 * pairs;
    return each_row(pool, x.dimensions()[0] * H, W, [&](int64_t n) {
      const T* from = data<T>(x) + n * W;
      T* to = data<T>(out) + n * W;
      const int64_t angle = n / H * pairs;
      std::copy_n(from, plain, to);
      rotate_row(from + plain, cos.typed_data() + angle, sin.typed_data() + angle, to + plain, pairs);
    });
  });
}

// The last R + P values of rows down [T, ...], w [L, R], layer, cosines and sines [T, P / 2] -> [T, R + P]: the latent
// normed, the key rotated.
ffi::Error latent_rows(ffi::ThreadPool pool, ffi::AnyBuffer down, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                       ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, ffi::Result<ffi::AnyBuffer> out, float eps) {
  return with_type(down, w, [&](auto type) {
    typedef decltype(type) T;
    const int64_t R = w.dimensions()[1], width = out->dimensions()[1], pairs = cos.dimensions()[1];
    const int64_t stride = down.dimensions()[1];
    const T* weights = layer_of<T>(w, layer);
    return each_row(pool, down.dimensions()[0], width, [&](int64_t n) {
      const T* from = data<T>(down) + (n + 1) * stride - width;
      T* to = data<T>(out) + n * width;
      norm_row(from, weights, to, R, eps);
      rotate_row(from + R, cos.typed_data() + n * pairs, sin.typed_data() + n * pairs, to + R, pairs);
    });
  });
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(SwiGlu, swiglu,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(RotateHeads, rotate_heads,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(LatentRows, latent_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
