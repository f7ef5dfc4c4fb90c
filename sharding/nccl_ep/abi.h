// The part of NCCL EP's C interface that the handlers use, version 0.2: low latency with rank-major rows, and high
// throughput with flat rows.
//
// Declared here, so that the handlers build without NVIDIA's headers and link nothing. Structs of that interface only
// grow at their end, and `size` says how much of one the caller knows. A test compares these with the installed header.

#ifndef DSV3_NCCL_EP_ABI_H_
#define DSV3_NCCL_EP_ABI_H_

#include <cstddef>
#include <cstdint>

namespace nccl_ep {

constexpr unsigned kMagic = 0xC00FFFEEu;
constexpr unsigned kTensorMagic = 0xCAFECAFEu;
constexpr unsigned kApiVersion = 2;
constexpr int kOldestVersion = 200;  // 0.2.0: low-latency combine of 0.1 reuses shared memory without a fence
constexpr int kOldestNccl = 23007;   // 2.30.7, which the release of 0.2 pins

typedef int Result;  // ncclResult_t; 0 is success
typedef struct Comm* Communicator;
typedef struct GroupState* Group;
typedef struct HandleState* Handle;
typedef void* Stream;

enum Type : int { kUint8 = 1, kInt32 = 2, kInt64 = 4, kFloat32 = 7, kBfloat16 = 9, kFloat8e4m3 = 10 };  // ncclDataType_t
enum Algorithm : int { kLowLatency = 0, kHighThroughput = 1 };
enum Layout : int { kRankMajor = 2, kFlat = 3 };
enum Overflow : int { kTrap = 0, kDrop = 2 };
enum ExpertIds : int { kGlobal = 2 };  // received ids as they were sent, -1 for those of other ranks
enum Recipe : int { kPlain = 0, kScalesForwarded = 1 };

struct UniqueId {
  char bytes[128];
};

struct Tensor {
  unsigned size = sizeof(Tensor), magic = kTensorMagic, dimensions = 0;
  Type type = kUint8;
  void *data = nullptr, *window = nullptr;
  uint64_t window_offset = 0;
  size_t* sizes = nullptr;
};

struct Allocator {
  void *allocate = nullptr, *release = nullptr, *context = nullptr;
};

struct GroupConfig {
  unsigned size = sizeof(GroupConfig), magic = kMagic, version = kApiVersion;
  Algorithm algorithm = kLowLatency;
  unsigned experts = 0, tokens_per_rank = 0, received_per_rank = 0, token_bytes = 0;
  unsigned long buffer_bytes = 0;
  unsigned queue_pairs = 0, channels = 0, multiprocessors = 0;
  Allocator allocator;
  unsigned enable_mask = 0;
  uint64_t timeout_ns = 0;
  int zero_copy = 0;
  Overflow overflow_policy = kTrap;
  unsigned top_k = 0;
  unsigned char padding[4] = {};
};

struct LayoutInfo {
  unsigned size = sizeof(LayoutInfo), magic = kMagic;
  Tensor *expert_counters = nullptr, *source_counters = nullptr, *expert_offsets = nullptr, *total = nullptr;
  ExpertIds ids = kGlobal;
  unsigned char padding[4] = {};
};

struct DispatchInputs {
  unsigned size = sizeof(DispatchInputs), magic = kMagic;
  Tensor *tokens = nullptr, *weights = nullptr, *scales = nullptr;
};

struct DispatchOutputs {
  unsigned size = sizeof(DispatchOutputs), magic = kMagic;
  Tensor *tokens = nullptr, *weights = nullptr, *scales = nullptr, *ids = nullptr;
};

struct DispatchConfig {
  unsigned size = sizeof(DispatchConfig), magic = kMagic, send_only = 0, round_scales = 0;
  int direction = 0;
  Recipe recipe = kPlain;
};

struct CombineInputs {
  unsigned size = sizeof(CombineInputs), magic = kMagic;
  Tensor *tokens = nullptr, *weights = nullptr, *scales = nullptr;
};

struct CombineOutputs {
  unsigned size = sizeof(CombineOutputs), magic = kMagic;
  Tensor *tokens = nullptr, *weights = nullptr;
};

struct CombineConfig {
  unsigned size = sizeof(CombineConfig), magic = kMagic, send_only = 0;
  int direction = 0, recipe = 0;
};

static_assert(sizeof(Tensor) == 48 && sizeof(GroupConfig) == 112 && sizeof(LayoutInfo) == 48);
static_assert(sizeof(DispatchInputs) == 32 && sizeof(DispatchOutputs) == 40 && sizeof(DispatchConfig) == 24);
static_assert(sizeof(CombineInputs) == 32 && sizeof(CombineOutputs) == 24 && sizeof(CombineConfig) == 20);

// Every function of the two libraries that is called, by name: X(library, name, parameters).
#define DSV3_NCCL_EP_FUNCTIONS(X)                                                                                  \
  X(nccl, ncclGetVersion, (int*))                                                                                  \
  X(nccl, ncclGetUniqueId, (UniqueId*))                                                                            \
  X(nccl, ncclCommInitRank, (Communicator*, int, UniqueId, int))                                                   \
  X(ep, ncclEpGetVersion, (int*))                                                                                  \
  X(ep, ncclEpCreateGroup, (Group*, Communicator, const GroupConfig*))                                             \
  X(ep, ncclEpHandleMemSize, (Group, Layout, const void*, size_t*, int))                                           \
  X(ep, ncclEpInitHandle, (Handle*, Group, Layout, const void*, int, const Tensor*))                               \
  X(ep, ncclEpUpdateHandle, (Handle, const Tensor*, const LayoutInfo*, Stream))                                    \
  X(ep, ncclEpHandleDestroy, (Handle))                                                                             \
  X(ep, ncclEpDispatch,                                                                                            \
    (Handle, const DispatchInputs*, const DispatchOutputs*, const LayoutInfo*, const DispatchConfig*, Stream))     \
  X(ep, ncclEpCombine, (Handle, const CombineInputs*, const CombineOutputs*, const CombineConfig*, Stream))        \
  X(ep, ncclEpComplete, (Handle, const void*, Stream))                                                             \
  X(ep, ncclEpGetAsyncError, (Group, int*))                                                                        \
  X(ep, ncclEpMaskQuery, (Group, int*, Stream))

}  // namespace nccl_ep

#endif  // DSV3_NCCL_EP_ABI_H_
