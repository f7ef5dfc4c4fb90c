// The library's groups, which Python creates before programs run.
//
// Both libraries are opened by path, so this file links neither.

#include "groups.h"

namespace {

using namespace nccl_ep;

thread_local std::string message;

const char* failed(std::string text) {
  message = std::move(text);
  return message.c_str();
}

// Makes the device current in this thread, as a communicator wants it.
bool make_current(int device) {
  int handle = 0;
  void* context = nullptr;
  return cuda("cuDeviceGet", &handle, device) && cuda("cuDevicePrimaryCtxRetain", &context, handle) &&
         cuda("cuCtxSetCurrent", context);
}

bool create_event(void** event) { return cuda("cuEventCreate", event, 2u); }  // 2: it takes no time

bool create_stream(Stream* stream) {
  int least = 0, greatest = 0;  // with the greatest priority, so that no other work delays transfers
  return cuda("cuCtxGetStreamPriorityRange", &least, &greatest) &&
         cuda("cuStreamCreateWithPriority", stream, 1u, greatest);  // 1: beside the default stream
}

}  // namespace

// These return nullptr, or what failed; the text is the calling thread's.
extern "C" const char* nccl_ep_open(const char* nccl_path, const char* ep_path) {
  const std::lock_guard<std::mutex> lock(mutex);
  void* const nccl = dlopen(nccl_path, RTLD_NOW | RTLD_GLOBAL);
  if (nccl == nullptr) return failed(dlerror());
  void* const ep = dlopen(ep_path, RTLD_LAZY);
  if (ep == nullptr) return failed(dlerror());
  Functions found;
#define DSV3_FIND(library, name, parameters)                                                                        \
  if (!(found.name = reinterpret_cast<decltype(found.name)>(dlsym(library, #name)))) {                              \
    return failed(std::string(#library "'s library lacks ") + #name);                                               \
  }
  DSV3_NCCL_EP_FUNCTIONS(DSV3_FIND)
#undef DSV3_FIND
  int version = 0;
  if (const Result r = found.ncclGetVersion(&version)) return failed(code("ncclGetVersion", r));
  if (version < kOldestNccl) {
    return failed("NCCL " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
                  std::to_string(version % 100) + " is refused, because NCCL EP 0.2 is released for 2.30.7: install that");
  }
  if (const Result r = found.ncclEpGetVersion(&version)) return failed(code("ncclEpGetVersion", r));
  if (version < kOldestVersion) {
    return failed("NCCL EP " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
                  " is refused, because its low-latency combine reuses shared memory without a fence: install 0.2");
  }
  functions = found;
  return nullptr;
}

extern "C" const char* nccl_ep_unique_id(char* id) {
  const Result result = functions.ncclGetUniqueId(reinterpret_cast<UniqueId*>(id));
  return result ? failed(code("ncclGetUniqueId", result)) : nullptr;
}

// Waits for all ranks.
extern "C" const char* nccl_ep_connect(int device, const char* id, int ranks, int rank, bool on_gpu) {
  if (on_gpu && !make_current(device)) return failed("libcuda.so.1 has no such device");
  UniqueId unique;
  std::copy_n(id, sizeof(unique.bytes), unique.bytes);
  Communicator made = nullptr;
  if (const Result r = functions.ncclCommInitRank(&made, ranks, unique, rank)) return failed(code("ncclCommInitRank", r));
  const std::lock_guard<std::mutex> lock(mutex);
  communicators[{device, ranks}] = made;
  return nullptr;
}

// Waits for all ranks, which must create their groups in one order. What exists stays. With high throughput, where the
// library waits without a limit, `limit_s` is that of XLA's thread.
extern "C" const char* nccl_ep_create_group(int device, const int64_t* numbers, int64_t timeout_ns, int64_t limit_s,
                                            bool on_gpu) {
  if (find(device, numbers) != nullptr) return nullptr;
  Key key;
  std::copy_n(numbers, kNumbers, key.begin());
  if (on_gpu && !make_current(device)) return failed("libcuda.so.1 has no such device");
  auto open = std::make_unique<Open>();
  open->chunk = size_t(key[kChunk]), open->received = size_t(key[kReceived]), open->on_gpu = on_gpu;
  const bool chunks = open->chunk != 0;
  Key same = key;  // of all that share a group
  if (chunks) same[kTokens] = same[kSlot] = 0;
  Communicator communicator = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    communicator = communicators.at({device, key[kRanks]});
    if (const auto found = shared.find({device, same}); found != shared.end()) open->beside = found->second;
  }
  if (open->beside != nullptr) {
    open->group = open->beside->group;
  } else {
    GroupConfig config;
    config.experts = unsigned(key[kExperts]), config.tokens_per_rank = unsigned(chunks ? key[kChunk] : key[kTokens]);
    config.top_k = unsigned(key[kTopK]), config.token_bytes = unsigned(key[kRowBytes]);
    config.timeout_ns = uint64_t(timeout_ns), config.enable_mask = !chunks;
    if (chunks) {
      config.algorithm = kHighThroughput, config.overflow_policy = kDrop;
      config.received_per_rank = unsigned(open->received);
    }
    if (const Result r = functions.ncclEpCreateGroup(&open->group, communicator, &config)) {
      return failed(code("ncclEpCreateGroup", r));
    }
  }
  if (chunks && open->beside == nullptr) {
    open->beside = new Beside;
    open->beside->group = open->group, open->beside->limit = std::chrono::seconds(limit_s);
    if (on_gpu && !create_stream(&open->beside->stream)) return failed("CUDA could not create a stream");
    open->beside->start([device, on_gpu] {
      if (on_gpu) make_current(device);
    });
  }
  // The first handle makes a group with low latency allocate its buffers, and later ones find them.
  const int64_t count = chunks ? (key[kTokens] + key[kChunk] - 1) / key[kChunk] : 1;
  const Layout layout = chunks ? kFlat : kRankMajor;
  for (int64_t i = 0; i < count; ++i) {
    Handle handle = nullptr;
    if (const Result r = functions.ncclEpInitHandle(&handle, open->group, layout, nullptr, int(key[kTopK]), nullptr)) {
      return failed(code("ncclEpInitHandle", r));
    }
    if (chunks) open->handles.push_back(handle);
    else functions.ncclEpHandleDestroy(handle);
  }
  const bool events = chunks && on_gpu;
  if (events && !(create_event(&open->ready) && create_event(&open->done))) return failed("CUDA has no event");
  const std::lock_guard<std::mutex> lock(mutex);
  if (chunks) shared[{device, same}] = open->beside;
  groups[{device, key}] = std::move(open);
  return nullptr;
}

// Writes 1 for each of `count` ranks that was late in a group of so many, so that results lack its experts. With high
// throughput the program fails instead.
extern "C" const char* nccl_ep_late(int32_t* is_late, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, open] : groups) {
    if (!open->low_latency() || key.second[kRanks] != count || late(*open).empty()) continue;
    std::vector<int> active(count);
    void* data = active.data();
    if (open->on_gpu && !(make_current(key.first) && cuda("cuMemAlloc_v2", &data, 4 * active.size()))) {
      return failed("CUDA has no memory for a mask");
    }
    if (const Result r = functions.ncclEpMaskQuery(open->group, static_cast<int*>(data), nullptr)) {
      return failed(code("ncclEpMaskQuery", r));
    }
    // The memory is not freed, which would wait for all work on the device; the instance ends.
    if (open->on_gpu && !cuda("cuMemcpyDtoH_v2", static_cast<void*>(active.data()), data, 4 * active.size())) {
      return failed("CUDA could not read a mask");
    }
    for (int64_t rank = 0; rank < count; ++rank) is_late[rank] |= !active[rank];
  }
  return nullptr;
}

// Forgets communicators and groups; the libraries keep what they allocated.
extern "C" void nccl_ep_forget() {
  const std::lock_guard<std::mutex> lock(mutex);
  groups.clear();
  shared.clear();
  communicators.clear();
}
