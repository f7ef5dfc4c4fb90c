// The order of rows for grouped products: XLA:CPU makes some thirty small programs of it in every layer.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

typedef ffi::ResultBuffer<ffi::S32> Numbers;

// ids [M] -> source_row [A], aligned_row [M], tile_group [tiles], counts [G], needed []: see `GroupAlignment`.
ffi::Error align_groups(ffi::Buffer<ffi::S32> ids, Numbers source_row, Numbers aligned_row, Numbers tile_group,
                        Numbers counts, Numbers needed) {
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
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AlignGroups, align_groups,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
