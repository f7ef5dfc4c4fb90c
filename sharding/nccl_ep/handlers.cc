// XLA's custom calls over NCCL EP, on a GPU's stream, or on a CPU with a library that has the same interface.
//
// A group exists before the first call (groups.cc); a call only enqueues: it allocates no device memory. What combine
// must know of a dispatch (the origin of each row) is a buffer that XLA passes along. A call with `send_only` leaves its
// second half, which writes the same buffers, to `Complete`; a slot has one such call in flight, so each micro-batch has
// its own.
//
// Low latency: the first half sends and the second receives; a slot is a group. High throughput: the library has no
// halves, so the first one forks a stream of the group and the second joins it. Rows go in chunks, so that the library's
// buffers, which grow with the rows of a call, stay small; each chunk has a handle, which keeps the origin of rows, and
// all slots share a group. The library waits on the host for the number of rows that a chunk brings, so a thread of the
// group makes the calls, and XLA's thread goes on until the second half, where it waits for a limited time.

#include <optional>

#include "groups.h"

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

bool takes(const ffi::AnyBuffer& buffer) {
  const auto type = buffer.element_type();
  return type == ffi::DataType::F32 || type == ffi::DataType::BF16 || type == ffi::DataType::F8E4M3FN;
}

// A handle with low latency, destroyed after its call or where that fails. A copy is the same: work can be copied.
typedef std::shared_ptr<HandleState> OwnedHandle;

// Makes a handle over the buffer `origins`, for the routing `ids`.
ffi::Error make_handle(const Open& open, Tensor* origins, Tensor* ids, Stream stream, OwnedHandle* handle) {
  const int top_k = int(ids->sizes[1]);
  size_t needed = 0;
  if (const Result r = functions.ncclEpHandleMemSize(open.group, kRankMajor, nullptr, &needed, top_k)) {
    return error(code("ncclEpHandleMemSize", r));
  }
  if (needed > origins->sizes[0]) return error("a handle needs " + std::to_string(needed) + " bytes");
  Handle made = nullptr;
  if (const Result r = functions.ncclEpInitHandle(&made, open.group, kRankMajor, nullptr, top_k, origins)) {
    return error(code("ncclEpInitHandle", r));
  }
  handle->reset(made, functions.ncclEpHandleDestroy);
  if (const Result r = functions.ncclEpUpdateHandle(made, ids, nullptr, stream)) {
    return error(code("ncclEpUpdateHandle", r));
  }
  return ffi::Error::Success();
}

// What follows a call on `handle`: the receiving half, if it only sent.
Work completes(OwnedHandle handle, bool sent_only) {
  return [handle, sent_only](Stream stream) {
    const Result result = sent_only ? functions.ncclEpComplete(handle.get(), nullptr, stream) : 0;
    return result ? error(code("ncclEpComplete", result)) : ffi::Error::Success();
  };
}

// Keeps the second half of a call and the buffers that it reads for `Complete`, or enqueues it at once.
ffi::Error finish(Open* open, Stream stream, bool halves, AllDescribed described, Work second) {
  if (!halves) return second(stream);
  open->described = std::move(described);
  open->second = std::move(second);
  return ffi::Error::Success();
}

// The halves of a call that the library makes at once, beside XLA's thread; with `halves` beside its stream, too.
// `work` owns what it reads, because it may outlive the call.
ffi::Error fork(Open* open, Stream stream, bool halves, Work work) {
  Beside* const beside = open->beside;
  const bool forks = halves && beside->stream;
  const Stream side = forks ? beside->stream : stream;
  if (forks && !cuda("cuEventRecord", open->ready, stream)) return error("CUDA could not record an event");
  auto made = std::make_shared<std::future<ffi::Error>>(beside->make([=, ready = open->ready, done = open->done] {
    if (forks && !cuda("cuStreamWaitEvent", side, ready, 0u)) return error("CUDA could not fork a stream");
    if (ffi::Error e = work(side); e.failure()) return e;
    return forks && !cuda("cuEventRecord", done, side) ? error("CUDA could not record") : ffi::Error::Success();
  }));
  return finish(open, stream, halves, {}, [beside, forks, made, done = open->done](Stream to) {
    if (ffi::Error e = beside->result_of(*made); e.failure()) return e;
    return forks && !cuda("cuStreamWaitEvent", to, done, 0u) ? error("CUDA could not join") : ffi::Error::Success();
  });
}

// The buffers of a dispatch: ids [t, K], weights [t, K], tokens [t, W], and scales [t, S] if there are some.
struct Sent {
  ffi::AnyBuffer ids, weights;
  std::vector<ffi::AnyBuffer> payload;
};

// Low latency: received ids and weights [R, T, K], origins, tokens [R, T, W], scales [R, T, S]; R ranks.
ffi::Error dispatch_rows(Open* open, Stream stream, const Sent& sent, const Sent& got, const ffi::AnyBuffer& origins,
                         bool send_only) {
  AllDescribed all;
  const auto describe = [&](const ffi::AnyBuffer& buffer) {
    all.push_back(std::make_unique<Described>(buffer));
    return all.back()->get();
  };
  DispatchInputs in;
  DispatchOutputs out;
  LayoutInfo layout;
  DispatchConfig config;
  out.ids = describe(got.ids), out.weights = describe(got.weights), in.weights = describe(sent.weights);
  in.tokens = describe(sent.payload[0]), out.tokens = describe(got.payload[0]);
  if (got.payload.size() > 1) {
    in.scales = describe(sent.payload[1]), out.scales = describe(got.payload[1]), config.recipe = kScalesForwarded;
  }
  config.send_only = send_only;
  OwnedHandle handle;
  if (ffi::Error e = make_handle(*open, describe(origins), describe(sent.ids), stream, &handle); e.failure()) return e;
  if (const Result r = functions.ncclEpDispatch(handle.get(), &in, &out, &layout, &config, stream)) {
    return error(code("ncclEpDispatch", r));
  }
  return finish(open, stream, send_only, std::move(all), completes(handle, send_only));
}

// High throughput, C chunks of at most N received rows each: received ids [C, N, K, 2] (int64), weights [C, N, K],
// totals [C], tokens [C, N, W], scales [C, N, S]. Where a total exceeds N, rows are lost.
ffi::Error dispatch_chunks(Open* open, Stream stream, const Sent& sent, const Sent& got, const ffi::AnyBuffer& totals,
                           bool halves) {
  struct Chunk {
    Handle handle;
    Tensor *ids, *total;
    DispatchInputs in;
    DispatchOutputs out;
  };
  const auto all = std::make_shared<AllDescribed>();
  const auto describe = [&](auto... arguments) {
    all->push_back(std::make_unique<Described>(arguments...));
    return all->back()->get();
  };
  std::vector<Chunk> chunks;
  const auto tokens = size_t(sent.ids.dimensions()[0]);
  open->dispatched = true;
  for (size_t i = 0; i < open->handles.size(); ++i) {
    const auto [first, count] = open->rows_of(i, tokens);
    const size_t lines = open->received, line = i * lines;
    Chunk chunk{open->handles[i], describe(sent.ids, first, count), describe(totals, i), {}, {}};
    chunk.in.weights = describe(sent.weights, first, count), chunk.out.weights = describe(got.weights, line, lines);
    chunk.out.ids = describe(got.ids, line, lines, true);
    chunk.in.tokens = describe(sent.payload[0], first, count);
    chunk.out.tokens = describe(got.payload[0], line, lines);
    if (got.payload.size() > 1) {
      chunk.in.scales = describe(sent.payload[1], first, count);
      chunk.out.scales = describe(got.payload[1], line, lines);
    }
    chunks.push_back(chunk);
  }
  return fork(open, stream, halves, [all, chunks](Stream to) {
    for (const Chunk& chunk : chunks) {
      LayoutInfo counted, numbering;
      counted.total = chunk.total;
      DispatchConfig config;
      if (chunk.in.scales != nullptr) config.recipe = kScalesForwarded;
      if (const Result r = functions.ncclEpUpdateHandle(chunk.handle, chunk.ids, &counted, to)) {
        return error(code("ncclEpUpdateHandle", r));
      }
      if (const Result r = functions.ncclEpDispatch(chunk.handle, &chunk.in, &chunk.out, &numbering, &config, to)) {
        return error(code("ncclEpDispatch", r));
      }
    }
    return ffi::Error::Success();
  });
}

ffi::Error dispatch(Stream stream, int32_t device, ffi::AnyBuffer ids, ffi::AnyBuffer weights,
                    ffi::RemainingArgs payload, ffi::Result<ffi::AnyBuffer> got_ids,
                    ffi::Result<ffi::AnyBuffer> got_weights, ffi::Result<ffi::AnyBuffer> origins,
                    ffi::RemainingRets got, KeyAttribute group, bool send_only) {
  Open* open = find(device, group.begin());
  if (open == nullptr) return error("no group was created for this program on device " + std::to_string(device));
  if (open->second) return error("a call was enqueued before the last one was completed");
  if (const std::string why = late(*open); !why.empty()) return error(why);
  Sent sent{ids, weights, {}}, received{*got_ids, *got_weights, {}};
  for (size_t i = 0; i < got.size(); ++i) {
    const auto from = payload.get<ffi::AnyBuffer>(i);
    const auto to = got.get<ffi::AnyBuffer>(i);
    if (i > 1 || !from || !to || !takes(**to)) return error("a payload is tokens and scales in float32, bf16 or e4m3");
    sent.payload.push_back(*from), received.payload.push_back(**to);
  }
  open->data = {got_ids->untyped_data(), got_weights->untyped_data(), origins->untyped_data(), ids.untyped_data(),
                weights.untyped_data()};
  for (const Sent* each : {&sent, &received}) {
    for (const ffi::AnyBuffer& buffer : each->payload) open->data.push_back(buffer.untyped_data());
  }
  return (open->low_latency() ? dispatch_rows : dispatch_chunks)(open, stream, sent, received, *origins, send_only);
}

// Low latency: sums [R, T, D], origins, ids [t, K] -> [t, D].
ffi::Error combine_rows(Open* open, Stream stream, const ffi::AnyBuffer& sums, const ffi::AnyBuffer& origins,
                        const ffi::AnyBuffer& ids, const ffi::AnyBuffer& result, bool send_only) {
  AllDescribed all;
  for (const ffi::AnyBuffer& buffer : {result, sums, origins, ids}) all.push_back(std::make_unique<Described>(buffer));
  CombineInputs in;
  CombineOutputs out;
  CombineConfig config;
  out.tokens = all[0]->get(), in.tokens = all[1]->get(), config.send_only = send_only;
  OwnedHandle handle;
  if (ffi::Error e = make_handle(*open, all[2]->get(), all[3]->get(), stream, &handle); e.failure()) return e;
  if (const Result r = functions.ncclEpCombine(handle.get(), &in, &out, &config, stream)) {
    return error(code("ncclEpCombine", r));
  }
  return finish(open, stream, send_only, std::move(all), completes(handle, send_only));
}

// High throughput: sums [C, N, D], ids [t, K] -> [t, D]; the handles know the origins. A program's first combine has no
// dispatch before it where micro-batches overlap: its ids select nothing, and the handles learn that from them.
ffi::Error combine_chunks(Open* open, Stream stream, const ffi::AnyBuffer& sums, const ffi::AnyBuffer& ids,
                          const ffi::AnyBuffer& result, bool halves) {
  const auto all = std::make_shared<AllDescribed>();
  std::vector<std::array<Tensor*, 3>> chunks;
  const auto tokens = size_t(ids.dimensions()[0]);
  const bool is_first = !std::exchange(open->dispatched, false);
  for (size_t i = 0; i < open->handles.size(); ++i) {
    const auto [first, count] = open->rows_of(i, tokens);
    all->push_back(std::make_unique<Described>(sums, i * open->received, open->received));
    all->push_back(std::make_unique<Described>(result, first, count));
    all->push_back(std::make_unique<Described>(ids, first, count));
    chunks.push_back({all->at(3 * i)->get(), all->at(3 * i + 1)->get(), all->at(3 * i + 2)->get()});
  }
  return fork(open, stream, halves, [all, chunks, is_first, handles = open->handles](Stream to) {
    for (size_t i = 0; i < chunks.size(); ++i) {
      CombineInputs in;
      CombineOutputs out;
      CombineConfig config;
      in.tokens = chunks[i][0], out.tokens = chunks[i][1];
      if (is_first) {
        if (const Result r = functions.ncclEpUpdateHandle(handles[i], chunks[i][2], nullptr, to)) {
          return error(code("ncclEpUpdateHandle", r));
        }
      }
      if (const Result r = functions.ncclEpCombine(handles[i], &in, &out, &config, to)) {
        return error(code("ncclEpCombine", r));
      }
    }
    return ffi::Error::Success();
  });
}

ffi::Error combine(Stream stream, int32_t device, ffi::AnyBuffer sums, ffi::AnyBuffer origins, ffi::AnyBuffer ids,
                   ffi::Result<ffi::AnyBuffer> result, KeyAttribute group, bool send_only) {
  Open* open = find(device, group.begin());
  if (open == nullptr || open->second) return error("there was no dispatch, or it was not completed");
  if (const std::string why = late(*open); !why.empty() && !open->low_latency()) return error(why);
  if (!takes(sums)) return error("sums are float32 or bf16");
  open->data = {result->untyped_data(), sums.untyped_data(), origins.untyped_data(), ids.untyped_data()};
  if (open->low_latency()) return combine_rows(open, stream, sums, origins, ids, *result, send_only);
  return combine_chunks(open, stream, sums, ids, *result, send_only);
}

// The results of the call in flight, aliased, then what must live as long as it -> these results, received.
ffi::Error complete(Stream stream, int32_t device, ffi::RemainingArgs given, ffi::RemainingRets results,
                    KeyAttribute group) {
  Open* open = find(device, group.begin());
  if (open == nullptr || !open->second) return error("no call is in flight");
  for (size_t i = 0; i < given.size(); ++i) {
    const auto from = given.get<ffi::AnyBuffer>(i);
    const void* const at = from ? from->untyped_data() : nullptr;
    const bool known = std::find(open->data.begin(), open->data.end(), at) != open->data.end();
    if (!known || (i < results.size() && (*results.get<ffi::AnyBuffer>(i))->untyped_data() != at)) {
      return error("XLA moved a buffer between a call and its completion");
    }
  }
  const Work second = std::exchange(open->second, nullptr);
  const AllDescribed described = std::exchange(open->described, {});
  return second(stream);
}

}  // namespace

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
