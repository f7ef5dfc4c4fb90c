// A library with the interface of NCCL EP over memory that ranks share: threads of one process, or processes of a host.
//
// It does what the interface says for low latency and rank-major rows, and for high throughput and flat rows, where all
// ranks are one node. It is strict where the real one crashes: lines without a row hold NaN and, with high throughput,
// ids of an own expert; widths must suit its kernels; a call before the last one was completed fails; and the second
// half reads the caller's descriptions again. With low latency rows arrive in another order than they were sent, a wait
// ends after the group's timeout, and a rank that is late is left out of what follows. With high throughput a wait ends
// when the others have come, or never.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "abi.h"

using namespace nccl_ep;

namespace nccl_ep {

struct Comm {
  std::string name;
  int ranks, rank, groups;
};

struct GroupState {
  Comm* comm;
  GroupConfig config;
  char* memory;
  size_t bytes;
  uint32_t epoch = 0;
  bool in_flight = false;
  int late = 0;
  std::vector<bool> active;

  bool flat() const { return config.algorithm == kHighThroughput; }
  int ranks() const { return comm->ranks; }
  size_t message() const { return 4 + 8 * size_t(config.top_k) + config.token_bytes; }
  size_t dispatched() const { return size_t(ranks()) * config.tokens_per_rank * message(); }
  size_t combined() const { return size_t(config.tokens_per_rank) * config.top_k * config.token_bytes; }
  size_t bank() const { return std::max(dispatched(), combined()); }
  size_t flags() const { return 64 + 8 * size_t(ranks()) * 2; }
  size_t part() const { return flags() + 2 * bank(); }  // of one receiving rank
  char* of(int rank) const { return memory + size_t(rank) * part(); }
  std::atomic<uint64_t>& attached(int rank) const { return *reinterpret_cast<std::atomic<uint64_t>*>(of(rank)); }
  std::atomic<uint64_t>& flag(int to, int from) const {
    char* at = of(to) + 64 + 8 * (size_t(epoch % 2) * ranks() + from);
    return *reinterpret_cast<std::atomic<uint64_t>*>(at);
  }
  char* data(int to) const { return of(to) + flags() + (epoch % 2) * bank(); }
  int owner(int expert) const { return expert < 0 ? -1 : expert / int(config.experts / ranks()); }
};

struct Arrived {  // a row, with high throughput
  int from;
  int32_t token, first_k;
};

struct HandleState {
  GroupState* group;
  int top_k;
  char* memory;
  const int32_t* ids;
  int tokens;
  std::function<Result()> receive;
  std::vector<int32_t> kept_ids;
  std::vector<Arrived> arrived;
  int32_t* total = nullptr;

  int32_t* counts() const { return reinterpret_cast<int32_t*>(memory); }
  int32_t* origin(int rank, int line) const {  // token, first k
    return counts() + group->ranks() + (size_t(rank) * group->config.tokens_per_rank + line) * (top_k + 1);
  }
  bool is_first(int token, int k) const {  // whether this id is the first of its rank
    const int32_t* row = ids + size_t(token) * top_k;
    const int owner = group->owner(row[k]);
    return owner >= 0 && std::none_of(row, row + k, [&](int32_t id) { return group->owner(id) == owner; });
  }
};

}  // namespace nccl_ep

namespace {

enum { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5 };

size_t width(Type type) { return type == kInt64 ? 8 : type == kFloat32 || type == kInt32 ? 4 : type == kBfloat16 ? 2 : 1; }
size_t row_bytes(const Tensor* tensor) { return tensor->sizes[tensor->dimensions - 1] * width(tensor->type); }

// Waits at most `timeout_ns`, or without a limit where that is 0; returns whether it is done.
bool waits(uint64_t timeout_ns, const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  for (int turn = 0; !done(); ++turn) {
    if (timeout_ns && std::chrono::steady_clock::now() > end) return done();
    if (turn < 16) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

// Waits for the flag of this epoch of each active rank, and calls `take` with the rank and its number of rows.
Result from_all(GroupState* group, const std::function<void(int, int)>& take) {
  for (int from = 0; from < group->ranks(); ++from) {
    if (!group->active[from]) continue;
    auto& flag = group->flag(group->comm->rank, from);
    uint64_t value = 0;
    const bool came = waits(group->flat() ? 0 : group->config.timeout_ns, [&] {
      value = flag.load(std::memory_order_acquire);
      return value >> 32 == group->epoch + 1;
    });
    if (came) {
      take(from, int(uint32_t(value)));
    } else {
      group->active[from] = false;
      group->late = 1;
    }
  }
  ++group->epoch;
  group->in_flight = false;
  return kSuccess;
}

float widen(const char* at, Type type) {
  uint32_t bits = 0;
  if (type == kFloat32) std::memcpy(&bits, at, 4);
  else std::memcpy(reinterpret_cast<char*>(&bits) + 2, at, 2);
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

void narrow(float value, char* at, Type type) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (type == kFloat32) {
    std::memcpy(at, &bits, 4);
  } else {  // to the nearest, ties to even
    const uint16_t half = value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40;
    std::memcpy(at, &half, 2);
  }
}

Result halves(HandleState* handle, bool send_only, std::function<Result()> receive) {
  if (!send_only) return receive();
  handle->receive = std::move(receive);
  return kSuccess;
}

// Brings rows to consecutive lines, in the order of ranks and tokens, and loses those beyond the last line.
Result receive_flat(HandleState* handle, const DispatchOutputs& out, int lines, size_t wide, size_t scales) {
  GroupState* group = handle->group;
  const int T = int(group->config.tokens_per_rank), K = handle->top_k;
  auto* ids = static_cast<int64_t*>(out.ids->data);
  auto* weights = static_cast<float*>(out.weights->data);
  std::memset(out.tokens->data, 0xff, lines * wide);
  std::memset(weights, 0xff, size_t(lines) * K * 4);
  std::fill_n(ids, size_t(lines) * K, int64_t(group->comm->rank) * (group->config.experts / group->ranks()));
  if (scales) std::memset(out.scales->data, 0xff, lines * scales);
  handle->arrived.clear();
  const Result done = from_all(group, [&](int from, int rows) {
    for (int row = rows - 1; row >= 0; --row) {  // they were sent from the last token on
      const char* at = group->data(group->comm->rank) + (size_t(from) * T + row) * group->message();
      Arrived arrived{from, 0, -1};
      std::memcpy(&arrived.token, at, 4);
      std::vector<std::pair<int32_t, float>> chosen;
      for (int k = 0; k < K; ++k) {
        int32_t id;
        float weight;
        std::memcpy(&id, at + 4 + 4 * k, 4), std::memcpy(&weight, at + 4 + 4 * (K + k), 4);
        if (group->owner(id) != group->comm->rank) continue;
        if (arrived.first_k < 0) arrived.first_k = k;
        chosen.push_back({id, weight});
      }
      std::sort(chosen.begin(), chosen.end());
      const size_t line = handle->arrived.size();
      handle->arrived.push_back(arrived);
      if (int(line) >= lines) continue;
      for (int k = 0; k < K; ++k) {
        const bool there = k < int(chosen.size());
        ids[line * K + k] = there ? chosen[k].first : -1, weights[line * K + k] = there ? chosen[k].second : 0;
      }
      std::memcpy(static_cast<char*>(out.tokens->data) + line * wide, at + 4 + 8 * K, wide);
      if (scales) std::memcpy(static_cast<char*>(out.scales->data) + line * scales, at + 4 + 8 * K + wide, scales);
    }
  });
  *handle->total = int32_t(handle->arrived.size());
  return done;
}

}  // namespace

extern "C" {

int stand_in_version = 200, stand_in_nccl = 23007;  // a test may set others
int stand_in_dies = 0;       // whether this process dies in its next dispatch with high throughput
int stand_in_handles = 0;    // handles that exist
int stand_in_calls = 0;      // dispatches, by any thread
int stand_in_chunks = 0;     // those with high throughput

Result ncclGetVersion(int* version) {
  *version = stand_in_nccl;
  return kSuccess;
}

Result ncclGetUniqueId(UniqueId* id) {
  std::random_device source;
  std::memset(id, 0, sizeof(*id));
  std::strcpy(id->bytes, ("/nccl-ep-" + std::to_string(getpid()) + "-" + std::to_string(source())).c_str());
  return kSuccess;
}

Result ncclCommInitRank(Communicator* made, int ranks, UniqueId id, int rank) {
  *made = new Comm{id.bytes, ranks, rank, 0};
  return kSuccess;
}

Result ncclEpGetVersion(int* version) {
  *version = stand_in_version;
  return kSuccess;
}

Result ncclEpCreateGroup(Group* made, Communicator comm, const GroupConfig* given) {
  if (given->size < sizeof(*given) || given->magic != kMagic || given->experts % comm->ranks) return kInvalidArgument;
  if (given->algorithm == kHighThroughput) {
    if (given->received_per_rank < given->tokens_per_rank || given->enable_mask || given->experts % 4) return kInvalidArgument;
    if (given->token_bytes % 16 || given->overflow_policy != kDrop) return kInvalidArgument;
  }
  auto* group = new GroupState{comm, *given, nullptr, 0};
  group->active.assign(comm->ranks, true);
  group->bytes = comm->ranks * group->part();
  const std::string name = comm->name + "-" + std::to_string(comm->groups++);
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, off_t(group->bytes))) return kSystemError;
  void* memory = mmap(nullptr, group->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kSystemError;
  group->memory = static_cast<char*>(memory);
  group->attached(comm->rank) = 1;
  const bool came = waits(60'000'000'000, [&] {
    for (int rank = 0; rank < comm->ranks; ++rank) {
      if (!group->attached(rank)) return false;
    }
    return true;
  });
  shm_unlink(name.c_str());  // of the first; for the others it is gone
  *made = group;
  return came ? kSuccess : kSystemError;
}

Result ncclEpHandleMemSize(Group group, Layout, const void*, size_t* bytes, int top_k) {
  const auto aligned = [](size_t n) { return (n + 255) / 256 * 256; };
  const size_t R = group->ranks(), lines = R * group->config.tokens_per_rank;
  *bytes = aligned(4 * (R + lines * (top_k + 1))) + aligned(8 * (group->config.experts / R) * R);
  return kSuccess;
}

Result ncclEpInitHandle(Handle* made, Group group, Layout layout, const void*, int top_k, const Tensor* memory) {
  size_t needed;
  ncclEpHandleMemSize(group, layout, nullptr, &needed, top_k);
  if (layout != (group->flat() ? kFlat : kRankMajor)) return kInvalidArgument;
  if (memory != nullptr && (group->flat() || memory->sizes[0] < needed)) return kInvalidArgument;
  char* const at = memory == nullptr ? nullptr : static_cast<char*>(memory->data);
  *made = new HandleState{group, top_k, at, nullptr, 0, {}, {}, {}};
  __atomic_add_fetch(&stand_in_handles, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

Result ncclEpUpdateHandle(Handle handle, const Tensor* ids, const LayoutInfo* layout, Stream) {
  if (ids->type != kInt32 || int(ids->sizes[1]) != handle->top_k) return kInvalidArgument;
  if (!handle->group->flat() && layout != nullptr) return kInvalidArgument;
  handle->ids = static_cast<const int32_t*>(ids->data);
  handle->tokens = int(ids->sizes[0]);
  if (layout != nullptr) {
    if (layout->total->type != kInt32 || layout->total->dimensions != 1) return kInvalidArgument;
    handle->total = static_cast<int32_t*>(layout->total->data);
  }
  if (handle->group->flat()) {
    handle->kept_ids.assign(handle->ids, handle->ids + handle->tokens * handle->top_k);
    handle->ids = handle->kept_ids.data();
    handle->arrived.clear();
  }
  return handle->tokens <= int(handle->group->config.tokens_per_rank) ? kSuccess : kInvalidArgument;
}

Result ncclEpHandleDestroy(Handle handle) {
  __atomic_sub_fetch(&stand_in_handles, 1, __ATOMIC_RELAXED);
  delete handle;
  return kSuccess;
}

Result ncclEpDispatch(Handle handle, const DispatchInputs* in, const DispatchOutputs* out, const LayoutInfo* layout,
                      const DispatchConfig* config, Stream) {
  GroupState* group = handle->group;
  const int T = int(group->config.tokens_per_rank), K = handle->top_k, R = group->ranks();
  const bool scaled = config->recipe == kScalesForwarded;
  const size_t wide = row_bytes(in->tokens), scales = scaled ? row_bytes(in->scales) : 0;
  if (std::exchange(group->in_flight, true)) return kInvalidUsage;
  if (wide % (scaled ? 16 : 512) || scales % 16 || scaled != (in->scales != nullptr)) return kInvalidArgument;
  if (wide + scales > group->config.token_bytes || row_bytes(out->tokens) != wide) return kInvalidArgument;
  if (K > int(group->config.top_k) || layout->ids != kGlobal) return kInvalidArgument;
  const int lines = int(out->tokens->sizes[group->flat() ? 0 : 1]);
  if (lines != int(group->flat() ? group->config.received_per_rank : T)) return kInvalidArgument;
  if (out->ids->type != (group->flat() ? kInt64 : kInt32) || (group->flat() && config->send_only)) return kInvalidArgument;
  __atomic_add_fetch(&stand_in_calls, 1, __ATOMIC_RELAXED);
  const auto* weights = static_cast<const float*>(in->weights->data);
  std::vector<int> sent(R);
  for (int token = handle->tokens - 1; token >= 0; --token) {
    for (int k = 0; k < K; ++k) {
      const int to = handle->is_first(token, k) ? group->owner(handle->ids[token * K + k]) : -1;
      if (to >= R) return kInvalidArgument;
      if (to < 0 || !group->active[to]) continue;
      char* at = group->data(to) + (size_t(group->comm->rank) * T + sent[to]++) * group->message();
      std::memcpy(at, &token, 4);
      std::memcpy(at + 4, handle->ids + token * K, 4 * K);
      std::memcpy(at + 4 + 4 * K, weights + token * K, 4 * K);
      std::memcpy(at + 4 + 8 * K, static_cast<char*>(in->tokens->data) + token * wide, wide);
      if (scaled) std::memcpy(at + 4 + 8 * K + wide, static_cast<char*>(in->scales->data) + token * scales, scales);
    }
  }
  for (int to = 0; to < R; ++to) {
    if (group->active[to]) group->flag(to, group->comm->rank) = uint64_t(group->epoch + 1) << 32 | uint32_t(sent[to]);
    if (group->flat() && stand_in_dies) kill(getpid(), SIGKILL);  // its rows have reached the first rank only
  }
  const DispatchOutputs results = *out;
  if (group->flat()) __atomic_add_fetch(&stand_in_chunks, 1, __ATOMIC_RELAXED);
  if (group->flat()) return receive_flat(handle, results, lines, wide, scales);
  return halves(handle, config->send_only, [=] {
    auto *tokens = static_cast<char*>(results.tokens->data), *factors = scaled ? static_cast<char*>(results.scales->data) : nullptr;
    auto *got_ids = static_cast<int32_t*>(results.ids->data), *got_weights = static_cast<int32_t*>(results.weights->data);
    std::memset(tokens, 0xff, size_t(R) * T * wide);
    if (scaled) std::memset(factors, 0xff, size_t(R) * T * scales);
    std::memset(got_weights, 0xff, size_t(R) * T * K * 4);
    std::fill_n(got_ids, size_t(R) * T * K, -1);
    std::fill_n(handle->counts(), R, 0);
    return from_all(group, [&](int from, int rows) {
      handle->counts()[from] = rows;
      for (int line = 0; line < rows; ++line) {
        const size_t slot = size_t(from) * T + line;
        const char* at = group->data(group->comm->rank) + slot * group->message();
        int32_t* origin = handle->origin(from, line);
        std::memcpy(origin, at, 4);
        std::memcpy(got_ids + slot * K, at + 4, 4 * K);
        std::memcpy(got_weights + slot * K, at + 4 + 4 * K, 4 * K);
        std::memcpy(tokens + slot * wide, at + 4 + 8 * K, wide);
        if (scaled) std::memcpy(factors + slot * scales, at + 4 + 8 * K + wide, scales);
        origin[1] = -1;
        for (int k = 0; k < K; ++k) {
          int32_t& id = got_ids[slot * K + k];
          if (group->owner(id) != group->comm->rank) id = -1;
          else if (origin[1] < 0) origin[1] = k;
        }
      }
    });
  });
}

Result ncclEpCombine(Handle handle, const CombineInputs* in, const CombineOutputs* out, const CombineConfig* config,
                     Stream) {
  GroupState* group = handle->group;
  const int T = int(group->config.tokens_per_rank), K = handle->top_k, R = group->ranks();
  const size_t wide = row_bytes(in->tokens), channels = in->tokens->sizes[in->tokens->dimensions - 1];
  const Type type = in->tokens->type;
  if (std::exchange(group->in_flight, true)) return kInvalidUsage;
  if (channels % 512 || wide > group->config.token_bytes || out->tokens->type != type) return kInvalidArgument;
  if (in->tokens->dimensions != (group->flat() ? 2u : 3u) || int(out->tokens->sizes[0]) != handle->tokens) return kInvalidArgument;
  const auto* sums = static_cast<const char*>(in->tokens->data);
  for (size_t line = 0; line < handle->arrived.size(); ++line) {
    const Arrived& to = handle->arrived[line];
    char* at = group->data(to.from) + (size_t(to.token) * K + to.first_k) * group->config.token_bytes;
    if (line < in->tokens->sizes[0]) std::memcpy(at, sums + line * wide, wide);
    else std::memset(at, 0, wide);
  }
  for (int to = 0; to < R; ++to) {
    if (!group->active[to]) continue;
    for (int line = 0; !group->flat() && line < handle->counts()[to]; ++line) {
      const int32_t* origin = handle->origin(to, line);
      char* at = group->data(to) + (size_t(origin[0]) * K + origin[1]) * group->config.token_bytes;
      std::memcpy(at, sums + (size_t(to) * T + line) * wide, wide);
    }
    group->flag(to, group->comm->rank) = uint64_t(group->epoch + 1) << 32;
  }
  const Tensor* const written = out->tokens;
  return halves(handle, config->send_only, [=] {
    char* result = static_cast<char*>(written->data);
    const char* received = group->data(group->comm->rank);
    const Result done = from_all(group, [](int, int) {});
    std::vector<float> total(channels);
    for (int token = 0; token < handle->tokens; ++token) {
      std::vector<std::pair<int, int>> order;  // of additions: as ids, or, with high throughput, as ranks
      for (int k = 0; k < K; ++k) {
        const int owner = group->owner(handle->ids[token * K + k]);
        if (handle->is_first(token, k) && group->active[owner]) order.push_back({group->flat() ? owner : 0, k});
      }
      std::stable_sort(order.begin(), order.end());
      std::fill(total.begin(), total.end(), 0.0f);
      for (const auto& [rank, k] : order) {
        const char* row = received + (size_t(token) * K + k) * group->config.token_bytes;
        for (size_t i = 0; i < channels; ++i) total[i] += widen(row + i * width(type), type);
      }
      for (size_t i = 0; i < channels; ++i) narrow(total[i], result + token * wide + i * width(type), type);
    }
    return done;
  });
}

Result ncclEpComplete(Handle handle, const void*, Stream) {
  return handle->receive ? std::exchange(handle->receive, nullptr)() : kInvalidUsage;
}

Result ncclEpGetAsyncError(Group group, int* late) {
  if (!group->config.enable_mask) return kInvalidUsage;
  *late = group->late;
  return kSuccess;
}

Result ncclEpMaskQuery(Group group, int* active, Stream) {
  if (!group->config.enable_mask) return kInvalidUsage;
  std::copy(group->active.begin(), group->active.end(), active);
  return kSuccess;
}

}  // extern "C"
