// What attention over pages and attention of new tokens share: a softmax that goes on from 64 keys to the next 64.

#ifndef DSV3_ATTENTION_H_
#define DSV3_ATTENTION_H_

#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kPage = 64;  // tokens; also the keys of a step of new tokens
constexpr float kNone = -std::numeric_limits<float>::infinity();

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87, where it is no normal number.
inline Floats exp_of(Floats x) {
  typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
  const Floats power = x * 1.44269504f;
  const Ints whole = __builtin_convertvector(power - 0.5f, Ints);  // towards zero, which is up here: to the nearest
  const Floats n = __builtin_convertvector(whole, Floats);
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Floats y = 1.9875691500e-4f * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Floats scaled = y * (Floats)((whole + 127) << 23);
  return (Floats)((Ints)scaled & (x > -87.0f));
}

// Up to four queries: running maximum and sum, and `width` unnormalized values of each.
struct Running {
  float *top, *total, *out;
};

// Turns the scores of 64 keys into weights, and brings what was summed before to the new maximum.
template <int M>
void weigh(float (&scores)[M][kPage], const int64_t (&visible)[M], float scale, int64_t R, Running running) {
  for (int m = 0; m < M; ++m) {
    Floats tops = {};
    tops += running.top[m];
    for (int64_t i = 0; i < kPage; i += kLanes) {
      for (int64_t lane = i; lane < i + kLanes; ++lane) {
        scores[m][lane] = lane < visible[m] ? scores[m][lane] * scale : kNone;
      }
      const Floats found = load<Floats>(&scores[m][i]);
      tops = found > tops ? found : tops;
    }
    float top = tops[0];
    for (int lane = 1; lane < kLanes; ++lane) top = std::max(top, tops[lane]);
    const float base = top == kNone ? 0 : top;
    Floats sums = {};
    for (int64_t i = 0; i < kPage; i += kLanes) {
      const Floats weights = exp_of(load<Floats>(&scores[m][i]) - base);
      std::memcpy(&scores[m][i], &weights, sizeof(weights));
      sums += weights;
    }
    const float shrink = std::exp(running.top[m] - base);
    running.total[m] = running.total[m] * shrink + sum(sums);
    running.top[m] = top;
    if (shrink != 1) {
      for (int64_t r = 0; r < R; ++r) running.out[m * R + r] *= shrink;
    }
  }
}

// Divides the values of one query by their sum, and stores them and the logarithm of the sum.
template <typename T>
inline void finish(float top, float total, const float* values, int64_t width, T* out, float* lse) {
  const bool any = total > 0;
  const float factor = any ? 1 / total : 0;
  for (int64_t r = 0; r < width; ++r) store(values[r] * factor, out + r);
  *lse = any ? top + std::log(total) : -kNone;
}

// Rows `first` to `first + count - 1` of chunk `chunk`, which is -1 for rows of no chunk.
struct Part {
  int64_t chunk, first, count;
};

// Cuts chunks that end at `ends` [G + 1] (the first entry is their begin), and the rows behind them, into parts of at
// most `most` rows. Bounds are kept within 0 and `rows`, whatever the ends are.
std::vector<Part> parts_of(const ffi::Buffer<ffi::S32>& ends, int64_t rows, int64_t most) {
  std::vector<Part> parts;
  int64_t first = 0;
  const int64_t G = ends.element_count() - 1;
  for (int64_t g = 0; g <= G; ++g) {
    const int64_t end = g < G ? std::clamp<int64_t>(ends.typed_data()[g + 1], first, rows) : rows;
    for (; first < end; first += std::min(most, end - first)) {
      parts.push_back({g < G ? g : -1, first, std::min(most, end - first)});
    }
  }
  return parts;
}

template <typename Body>
ffi::Error with_type(const ffi::AnyBuffer& q, const ffi::AnyBuffer& keys, const Body& body) {
  if (q.element_type() != keys.element_type()) return wrong("q and keys are of different types");
  if (q.element_type() == ffi::F32) return body(float{});
  if (q.element_type() == ffi::BF16) return body(BFloat16{});
  return wrong("no attention of this type");
}

}  // namespace

#endif  // DSV3_ATTENTION_H_
