// XLA's custom calls over NCCL EP, on a GPU's stream, or on a CPU with a library that has the same interface.
//
// Both libraries are opened by path, so this file links neither. A group exists before the first call; a call only
// enqueues: it allocates no device memory and does not wait for one. What combine must know of a dispatch (the origin of
// each row) is a buffer that XLA passes along. A call with `send_only` leaves the receiving half, which writes the same
// buffers, to `Complete`; a group has one such call in flight, so micro-batches have groups of their own (`slot`).

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

struct NoStream {};  // in the place of a GPU's stream in a CPU's handlers

}  // namespace

template <>
struct xla::ffi::CtxDecoding<NoStream> {
  using Type = nccl_ep::Stream;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_InvokeContext*, DiagnosticEngine&) {
    return Type{nullptr};
  }
};

namespace {

using namespace nccl_ep;

struct Functions {
#define DSV3_DECLARE(library, name, parameters) Result(*name) parameters = nullptr;
  DSV3_NCCL_EP_FUNCTIONS(DSV3_DECLARE)
#undef DSV3_DECLARE
};

class Described {  // a buffer as the library describes one
 public:
  Described(const ffi::AnyBuffer& buffer) : sizes_(buffer.dimensions().begin(), buffer.dimensions().end()) {
    static const std::map<ffi::DataType, Type> types = {{ffi::DataType::U8, kUint8},
                                                        {ffi::DataType::S32, kInt32},
                                                        {ffi::DataType::F32, kFloat32},
                                                        {ffi::DataType::BF16, kBfloat16},
                                                        {ffi::DataType::F8E4M3FN, kFloat8e4m3}};
    tensor_.dimensions = unsigned(sizes_.size());
    tensor_.type = types.at(buffer.element_type());
    tensor_.data = buffer.untyped_data();
    tensor_.sizes = sizes_.data();
  }
  Described(const Described&) = delete;
  Tensor* get() { return &tensor_; }

 private:
  std::vector<size_t> sizes_;
  Tensor tensor_;
};

typedef std::vector<std::unique_ptr<Described>> AllDescribed;

struct Open {
  Group group = nullptr;
  Handle pending = nullptr;  // of a call whose receiving half has not been enqueued
  AllDescribed described;    // its buffers, which that half reads; first those that it writes
};

// A group: `GroupKey` in library.py has these numbers in this order.
enum { kRanks, kTokens, kTopK, kExperts, kRowBytes, kSlot, kNumbers };
typedef std::array<int64_t, kNumbers> Key;
typedef ffi::Span<const int64_t> KeyAttribute;

std::mutex mutex;
Functions functions;
std::map<std::pair<int, int64_t>, Communicator> communicators;  // by device and number of ranks
std::map<std::pair<int, Key>, std::unique_ptr<Open>> groups;    // by device and key
thread_local std::string message;

const char* failed(std::string text) {
  message = std::move(text);
  return message.c_str();
}

ffi::Error error(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInternal, "nccl_ep: " + text); }

std::string code(const char* name, Result result) { return std::string(name) + " returned " + std::to_string(result); }

// Makes the device current in this thread, as a communicator wants it.
bool make_current(int device) {
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (cuda == nullptr) return false;
  const auto get = reinterpret_cast<int (*)(int*, int)>(dlsym(cuda, "cuDeviceGet"));
  const auto retain = reinterpret_cast<int (*)(void**, int)>(dlsym(cuda, "cuDevicePrimaryCtxRetain"));
  const auto set = reinterpret_cast<int (*)(void*)>(dlsym(cuda, "cuCtxSetCurrent"));
  int handle = 0;
  void* context = nullptr;
  return get && retain && set && !get(&handle, device) && !retain(&context, handle) && !set(context);
}

bool takes(const ffi::AnyBuffer& buffer) {
  const auto type = buffer.element_type();
  return type == ffi::DataType::F32 || type == ffi::DataType::BF16 || type == ffi::DataType::F8E4M3FN;
}

Open* find(int device, const int64_t* numbers) {
  Key key;
  std::copy_n(numbers, kNumbers, key.begin());
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = groups.find({device, key});
  return found == groups.end() ? nullptr : found->second.get();
}

// Returns what the library says of a group's ranks, or nothing.
std::string late(const Open& open) {
  int is_late = 0;
  if (const Result r = functions.ncclEpGetAsyncError(open.group, &is_late)) return code("ncclEpGetAsyncError", r);
  return is_late ? "a rank did not answer in time and is left out, so results lack its experts" : "";
}

// Makes a handle over the buffer `origins`, for the routing `ids`.
ffi::Error bind(const Open& open, Tensor* origins, Tensor* ids, Stream stream, Handle* handle) {
  const int top_k = int(ids->sizes[1]);
  size_t needed = 0;
  if (const Result r = functions.ncclEpHandleMemSize(open.group, kRankMajor, nullptr, &needed, top_k)) {
    return error(code("ncclEpHandleMemSize", r));
  }
  if (needed > origins->sizes[0]) return error("a handle needs " + std::to_string(needed) + " bytes");
  if (const Result r = functions.ncclEpInitHandle(handle, open.group, kRankMajor, nullptr, top_k, origins)) {
    return error(code("ncclEpInitHandle", r));
  }
  if (const Result r = functions.ncclEpUpdateHandle(*handle, ids, nullptr, stream)) {
    return error(code("ncclEpUpdateHandle", r));
  }
  return ffi::Error::Success();
}

// Keeps the handle and the buffers of a call with `send_only` for `Complete`; those of a whole call are done.
ffi::Error finish(Open* open, Handle handle, bool send_only, AllDescribed described) {
  if (!send_only) {
    functions.ncclEpHandleDestroy(handle);
    return ffi::Error::Success();
  }
  open->pending = handle;
  open->described = std::move(described);
  return ffi::Error::Success();
}

// ids [t, K], weights [t, K], tokens [t, W] and scales [t, S] if there are some -> ids and weights [R, T, K], origins,
// tokens [R, T, W], scales [R, T, S]; R ranks.
ffi::Error dispatch(Stream stream, int32_t device, ffi::AnyBuffer ids, ffi::AnyBuffer weights,
                    ffi::RemainingArgs payload, ffi::Result<ffi::AnyBuffer> got_ids,
                    ffi::Result<ffi::AnyBuffer> got_weights, ffi::Result<ffi::AnyBuffer> origins,
                    ffi::RemainingRets got, KeyAttribute group, bool send_only) {
  Open* open = find(device, group.begin());
  if (open == nullptr) return error("no group was created for this program on device " + std::to_string(device));
  if (open->pending != nullptr) return error("a call was enqueued before the last one was completed");
  if (const std::string why = late(*open); !why.empty()) return error(why);
  AllDescribed all;
  const auto describe = [&](const ffi::AnyBuffer& buffer) {
    all.push_back(std::make_unique<Described>(buffer));
    return all.back()->get();
  };
  DispatchInputs in;
  DispatchOutputs out;
  LayoutInfo layout;
  DispatchConfig config;
  out.ids = describe(*got_ids), out.weights = describe(*got_weights);
  Tensor* const notes = describe(*origins);
  Tensor** const results[] = {&out.tokens, &out.scales};
  Tensor** const sent[] = {&in.tokens, &in.scales};
  for (size_t i = 0; i < got.size(); ++i) {
    const auto to = got.get<ffi::AnyBuffer>(i);
    if (i > 1 || !to || !takes(**to)) return error("a payload is tokens and scales in float32, bf16 or e4m3");
    *results[i] = describe(**to);
  }
  for (size_t i = 0; i < got.size(); ++i) *sent[i] = describe(*payload.get<ffi::AnyBuffer>(i));
  in.weights = describe(weights);
  if (in.scales != nullptr) config.recipe = kScalesForwarded;
  config.send_only = send_only;
  Handle handle = nullptr;
  if (ffi::Error e = bind(*open, notes, describe(ids), stream, &handle); e.failure()) return e;
  if (const Result r = functions.ncclEpDispatch(handle, &in, &out, &layout, &config, stream)) {
    return error(code("ncclEpDispatch", r));
  }
  return finish(open, handle, send_only, std::move(all));
}

// sums [R, T, D], origins, ids [t, K] -> [t, D].
ffi::Error combine(Stream stream, int32_t device, ffi::AnyBuffer sums, ffi::AnyBuffer origins, ffi::AnyBuffer ids,
                   ffi::Result<ffi::AnyBuffer> result, KeyAttribute group, bool send_only) {
  Open* open = find(device, group.begin());
  if (open == nullptr || open->pending != nullptr) return error("there was no dispatch, or it was not completed");
  if (!takes(sums)) return error("sums are float32 or bf16");
  AllDescribed all;
  for (const ffi::AnyBuffer& buffer : {ffi::AnyBuffer(*result), sums, origins, ids}) {
    all.push_back(std::make_unique<Described>(buffer));
  }
  CombineInputs in;
  CombineOutputs out;
  CombineConfig config;
  out.tokens = all[0]->get(), in.tokens = all[1]->get(), config.send_only = send_only;
  Handle handle = nullptr;
  if (ffi::Error e = bind(*open, all[2]->get(), all[3]->get(), stream, &handle); e.failure()) return e;
  if (const Result r = functions.ncclEpCombine(handle, &in, &out, &config, stream)) {
    return error(code("ncclEpCombine", r));
  }
  return finish(open, handle, send_only, std::move(all));
}

// The results of the call in flight, aliased, then what must live as long as it -> these results, received.
ffi::Error complete(Stream stream, int32_t device, ffi::RemainingArgs given, ffi::RemainingRets results,
                    KeyAttribute group) {
  Open* open = find(device, group.begin());
  if (open == nullptr || open->pending == nullptr) return error("no call is in flight");
  for (size_t i = 0; i < results.size(); ++i) {
    const auto from = given.get<ffi::AnyBuffer>(i);
    const auto to = results.get<ffi::AnyBuffer>(i);
    const void* const written = open->described[i]->get()->data;
    if (!from || !to || from->untyped_data() != written || (*to)->untyped_data() != written) {
      return error("XLA moved a buffer between a call and its completion");
    }
  }
  const Handle handle = std::exchange(open->pending, nullptr);
  const Result result = functions.ncclEpComplete(handle, nullptr, stream);
  functions.ncclEpHandleDestroy(handle);
  open->described.clear();
  return result ? error(code("ncclEpComplete", result)) : ffi::Error::Success();
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

// Waits for all ranks, which must create their groups in one order. A group that exists stays.
extern "C" const char* nccl_ep_create_group(int device, const int64_t* numbers, int64_t timeout_ns) {
  if (find(device, numbers) != nullptr) return nullptr;
  Key key;
  std::copy_n(numbers, kNumbers, key.begin());
  GroupConfig config;
  config.experts = unsigned(key[kExperts]), config.tokens_per_rank = unsigned(key[kTokens]);
  config.top_k = unsigned(key[kTopK]), config.token_bytes = unsigned(key[kRowBytes]);
  config.enable_mask = 1, config.timeout_ns = uint64_t(timeout_ns);
  auto open = std::make_unique<Open>();
  Communicator communicator = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    communicator = communicators.at({device, key[kRanks]});
  }
  if (const Result r = functions.ncclEpCreateGroup(&open->group, communicator, &config)) {
    return failed(code("ncclEpCreateGroup", r));
  }
  Handle first = nullptr;  // the first handle makes the group allocate its buffers, later ones find them
  if (const Result r = functions.ncclEpInitHandle(&first, open->group, kRankMajor, nullptr, int(key[kTopK]), nullptr)) {
    return failed(code("ncclEpInitHandle", r));
  }
  functions.ncclEpHandleDestroy(first);
  const std::lock_guard<std::mutex> lock(mutex);
  groups[{device, key}] = std::move(open);
  return nullptr;
}

// Says whether results since the groups' creation can be used.
extern "C" const char* nccl_ep_check() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, open] : groups) {
    if (std::string why = late(*open); !why.empty()) return failed(std::move(why));
  }
  return nullptr;
}

// Forgets communicators and groups; the libraries keep what they allocated.
extern "C" void nccl_ep_forget() {
  const std::lock_guard<std::mutex> lock(mutex);
  groups.clear();
  communicators.clear();
}

namespace {

template <typename Binding>
auto on_group(Binding binding) {
  return std::move(binding).template Attr<KeyAttribute>("group");
}

auto on_gpu() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<Stream>>().Ctx<ffi::DeviceOrdinal>(); }

auto on_cpu() { return ffi::Ffi::Bind().Ctx<NoStream>().Ctx<ffi::DeviceOrdinal>(); }

template <typename Binding>
auto dispatch_of(Binding binding) {
  return on_group(std::move(binding)
                      .template Arg<ffi::AnyBuffer>()
                      .template Arg<ffi::AnyBuffer>()
                      .RemainingArgs()
                      .template Ret<ffi::AnyBuffer>()
                      .template Ret<ffi::AnyBuffer>()
                      .template Ret<ffi::AnyBuffer>()
                      .RemainingRets())
      .template Attr<bool>("send_only");
}

template <typename Binding>
auto combine_of(Binding binding) {
  return on_group(std::move(binding)
                      .template Arg<ffi::AnyBuffer>()
                      .template Arg<ffi::AnyBuffer>()
                      .template Arg<ffi::AnyBuffer>()
                      .template Ret<ffi::AnyBuffer>())
      .template Attr<bool>("send_only");
}

template <typename Binding>
auto complete_of(Binding binding) {
  return on_group(std::move(binding).RemainingArgs().RemainingRets());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DispatchOnGpu, dispatch, dispatch_of(on_gpu()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(CombineOnGpu, combine, combine_of(on_gpu()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(CompleteOnGpu, complete, complete_of(on_gpu()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(DispatchOnCpu, dispatch, dispatch_of(on_cpu()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(CombineOnCpu, combine, combine_of(on_cpu()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(CompleteOnCpu, complete, complete_of(on_cpu()));
