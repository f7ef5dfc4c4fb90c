// Experts chosen from scores, and the order of rows for their products: XLA:CPU makes some forty small programs of both
// in every layer.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "vectors.h"

namespace {

typedef ffi::ResultBuffer<ffi::S32> Numbers;

constexpr int64_t kScoresPerTask = 16 << 10;  // to order so many takes far longer than to hand them over

// Floats as XLA's top_k orders them: -NaN, -infinity, ..., -0, 0, ..., infinity, NaN. No row can do without K experts.
inline int32_t ordered(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Writes the numbers of the `count` best of `values` to `best`, best first; of equal values the first ones.
void best_of(const std::vector<float>& values, int64_t count, std::vector<int32_t>& order, int32_t* best) {
  order.resize(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int32_t a, int32_t b) {
    const int32_t first = ordered(values[a]), second = ordered(values[b]);
    return first != second ? first > second : a < b;
  });
  std::copy_n(order.begin(), count, best);
}

struct Groups {
  int64_t number, kept, counted;  // groups; those whose experts may be chosen; the experts of a group that decide
};

// Puts the experts outside of the best groups out of reach. A group is as good as its best experts together.
void keep_best(const Groups& groups, std::vector<float>& scores, std::vector<int32_t>& order) {
  const int64_t size = scores.size() / groups.number;
  std::vector<float> totals(groups.number), own(size);
  std::vector<int32_t> best(std::max(groups.counted, groups.kept));
  for (int64_t g = 0; g < groups.number; ++g) {
    own.assign(scores.begin() + g * size, scores.begin() + (g + 1) * size);
    best_of(own, groups.counted, order, best.data());
    totals[g] = groups.counted > 1 ? 0.0f : -0.0f;  // XLA adds to 0, but leaves a single score as it is: -0 too
    for (int64_t i = 0; i < groups.counted; ++i) totals[g] += own[best[i]];
  }
  best_of(totals, groups.kept, order, best.data());
  for (int64_t g = 0; g < groups.number; ++g) {
    if (std::find(best.begin(), best.begin() + groups.kept, g) != best.begin() + groups.kept) continue;
    std::fill_n(scores.begin() + g * size, size, -std::numeric_limits<float>::infinity());
  }
}

// scores [T, E] -> ids [T, K]: see `choose_experts`. One group is no group.
ffi::Error choose_experts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> scores, Numbers ids, int64_t groups, int64_t kept,
                          int64_t counted) {
  const int64_t T = scores.dimensions()[0], E = scores.dimensions()[1], K = ids->dimensions()[1];
  if (groups < 1 || E % groups || kept > groups || counted > E / groups || K > E) return wrong("no such choice");
  const int64_t rows = std::max<int64_t>(1, kScoresPerTask / E), tasks = (T + rows - 1) / rows;
  for_each(pool, tasks, tasks, [&](int64_t task) {
    std::vector<float> own(E);
    std::vector<int32_t> order;
    for (int64_t t = task * rows; t < std::min(T, (task + 1) * rows); ++t) {
      own.assign(scores.typed_data() + t * E, scores.typed_data() + (t + 1) * E);
      if (groups > 1) keep_best({groups, kept, counted}, own, order);
      best_of(own, K, order, ids->typed_data() + t * K);
    }
  });
  return ffi::Error::Success();
}

// ids [M] -> source_row [A], aligned_row [M], tile_group [tiles], counts [G], needed [], overflow []: see `GroupAlignment`.
ffi::Error align_groups(ffi::Buffer<ffi::S32> ids, Numbers source_row, Numbers aligned_row, Numbers tile_group,
                        Numbers counts, Numbers needed, Numbers overflow) {
  const int64_t M = ids.element_count(), A = source_row->element_count(), G = counts->element_count();
  const int64_t tiles = tile_group->element_count(), height = A / tiles;
  const int32_t* group = ids.typed_data();
  int32_t *source = source_row->typed_data(), *aligned = aligned_row->typed_data();
  int32_t *tile = tile_group->typed_data(), *count = counts->typed_data();
  std::fill_n(source, A, int32_t(M));
  std::fill_n(tile, tiles, -1);
  std::fill_n(count, G, 0);
  const auto has_group = [&](int64_t row) { return group[row] >= 0 && group[row] < G; };
  for (int64_t row = 0; row < M; ++row) {
    if (has_group(row)) ++count[group[row]];
  }
  std::vector<int64_t> next(G);  // the aligned row of a group's next row
  int64_t end = 0;
  for (int64_t g = 0; g < G; ++g) {
    next[g] = end;
    end += (count[g] + height - 1) / height * height;
    for (int64_t t = next[g] / height; t < std::min(end / height, tiles); ++t) tile[t] = int32_t(g);
  }
  for (int64_t row = 0; row < M; ++row) {
    aligned[row] = int32_t(has_group(row) ? next[group[row]]++ : A);
    if (aligned[row] < A) source[aligned[row]] = int32_t(row);
  }
  *needed->typed_data() = int32_t(end);
  *overflow->typed_data() = end > A;
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChooseExperts, choose_experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("kept")
                                  .Attr<int64_t>("counted"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(AlignGroups, align_groups,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
