// What the calls share: groups with their handles and halves in flight, and buffers as the library describes them.

#ifndef DSV3_NCCL_EP_GROUPS_H_
#define DSV3_NCCL_EP_GROUPS_H_

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "abi.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace nccl_ep {

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
  // `count` rows from `first` on, where the last axis is a row; with `wide` two int32 are an int64.
  Described(const ffi::AnyBuffer& buffer, size_t first, size_t count, bool wide = false) : Described(buffer) {
    if (wide) sizes_.pop_back(), tensor_.type = kInt64;
    const size_t width = sizes_.back(), rows = buffer.element_count() / (wide ? 2 : 1) / width;
    tensor_.data = static_cast<char*>(tensor_.data) + first * (buffer.size_bytes() / rows);
    sizes_ = {count, width}, tensor_.dimensions = 2, tensor_.sizes = sizes_.data();
  }
  // Item `number` of a list.
  Described(const ffi::AnyBuffer& list, size_t number) : Described(list) {
    tensor_.data = static_cast<char*>(tensor_.data) + number * (list.size_bytes() / list.element_count());
    sizes_ = {1};
  }
  Described(const Described&) = delete;
  Tensor* get() { return &tensor_; }

 private:
  std::vector<size_t> sizes_;
  Tensor tensor_;
};

typedef std::vector<std::unique_ptr<Described>> AllDescribed;

typedef std::function<ffi::Error(Stream)> Work;

inline ffi::Error error(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInternal, "nccl_ep: " + text); }

// A group with high throughput, and what makes its calls beside XLA; it lives as long as the process.
//
// The library's host code and kernels wait for other ranks without a limit: `timeout_ns` is of low latency, and kernels
// do not read the flag of ncclCommAbort. So a call that does not return stays in this thread, and XLA's goes on.
class Beside {
 public:
  Group group = nullptr;
  Stream stream = nullptr;  // none on a CPU
  std::chrono::seconds limit{0};  // how long XLA's thread waits for a call
  std::atomic<bool> is_late{false};  // a call took longer

  // Waits for a call that was made.
  ffi::Error result_of(std::future<ffi::Error>& made) {
    if (made.wait_for(limit) == std::future_status::ready) return made.get();
    is_late = true;
    return error("a call with high throughput did not return within " + std::to_string(limit.count()) +
                 " s: another rank is dead or hangs");
  }

  // Makes a call after those before it.
  std::future<ffi::Error> make(std::function<ffi::Error()> call) {
    std::packaged_task<ffi::Error()> task(std::move(call));
    std::future<ffi::Error> made = task.get_future();
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    there_.notify_one();
    return made;
  }

  // Starts the thread, in which `prepare` runs first.
  void start(std::function<void()> prepare) {
    std::thread([this, prepare] {
      prepare();
      for (;;) {
        std::unique_lock<std::mutex> lock(mutex_);
        there_.wait(lock, [this] { return !tasks_.empty(); });
        std::packaged_task<ffi::Error()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
      }
    }).detach();
  }

 private:
  std::mutex mutex_;
  std::condition_variable there_;
  std::deque<std::packaged_task<ffi::Error()>> tasks_;
};

struct Open {
  Group group = nullptr;
  bool on_gpu = false;
  std::vector<Handle> handles;    // of the chunks, with high throughput
  size_t chunk = 0, received = 0; // rows of a chunk: those that a device sends, and those that it receives at most
  Beside* beside = nullptr;       // with high throughput
  bool dispatched = false;        // a combine is due: handles have the routing of its dispatch; with high throughput
  void *ready = nullptr, *done = nullptr;  // events that fork and join its stream
  Work second;                    // the half of a call that has not been enqueued
  AllDescribed described;         // what that half reads, with low latency
  std::vector<const void*> data;  // all buffers of the call

  bool low_latency() const { return handles.empty(); }
  // The first row of a chunk, and how many, of `tokens`.
  std::pair<size_t, size_t> rows_of(size_t number, size_t tokens) const {
    const size_t first = std::min(number * chunk, tokens);
    return {first, std::min(chunk, tokens - first)};
  }
};

// A slot of a group: `GroupKey` in library.py has these numbers in this order.
enum { kRanks, kTokens, kTopK, kExperts, kRowBytes, kSlot, kChunk, kReceived, kNumbers };
typedef std::array<int64_t, kNumbers> Key;
typedef ffi::Span<const int64_t> KeyAttribute;

inline std::mutex mutex;
inline Functions functions;
inline std::map<std::pair<int, int64_t>, Communicator> communicators;  // by device and number of ranks
inline std::map<std::pair<int, Key>, std::unique_ptr<Open>> groups;    // by device and key
inline std::map<std::pair<int, Key>, Beside*> shared;                  // by device and key, with tokens and slot of 0

inline std::string code(const char* name, Result result) { return std::string(name) + " returned " + std::to_string(result); }

// Calls a function of CUDA's driver; says whether it succeeded.
template <typename... Arguments>
bool cuda(const char* name, Arguments... arguments) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  const auto function = driver ? reinterpret_cast<int (*)(Arguments...)>(dlsym(driver, name)) : nullptr;
  return function && !function(arguments...);
}

inline Open* find(int device, const int64_t* numbers) {
  Key key;
  std::copy_n(numbers, kNumbers, key.begin());
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = groups.find({device, key});
  return found == groups.end() ? nullptr : found->second.get();
}

// Returns why no more calls are made on a group, or nothing.
inline std::string late(const Open& open) {
  int is_late = 0;
  if (!open.low_latency()) return open.beside->is_late ? "a rank did not answer in time" : "";
  if (const Result r = functions.ncclEpGetAsyncError(open.group, &is_late)) return code("ncclEpGetAsyncError", r);
  return is_late ? "a rank did not answer in time and is left out" : "";
}

}  // namespace nccl_ep

#endif  // DSV3_NCCL_EP_GROUPS_H_
