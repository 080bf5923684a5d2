// Every function of skim/c_api.h is a call of the library inside `guarded`, which turns exceptions
// into codes.
#include "skim/c_api.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "c_api/reducer_options.hpp"
#include "communicator/streams.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"
#include "skim/version.hpp"

using namespace skim;

struct skim_communicator {
  std::shared_ptr<Communicator> own;
};
struct skim_reducer {
  std::shared_ptr<Communicator> communicator;  // outlives `own`
  Reducer own;
};

namespace {

// The only state of the library that is not in an object.
thread_local std::string last_error_text;
thread_local const char* last_error = "";
thread_local std::string last_differences;

skim_status failed(skim_status status, const char* why) noexcept {
  try {
    last_error_text = why;
    last_error = last_error_text.c_str();
  } catch (...) {
    last_error = "out of memory";
  }
  return status;
}

template <class F>
skim_status guarded(F&& f) noexcept {
  try {
    f();
    return SKIM_OK;
  } catch (const InvalidArgument& e) {
    return failed(SKIM_INVALID_ARGUMENT, e.what());
  } catch (const CommError& e) {
    return failed(SKIM_COMM_ERROR, e.what());
  } catch (const NonFiniteError& e) {
    return failed(SKIM_NON_FINITE, e.what());
  } catch (const StateError& e) {
    return failed(SKIM_STATE_ERROR, e.what());
  } catch (const std::bad_alloc&) {
    return failed(SKIM_OTHER_ERROR, "out of memory");
  } catch (const std::exception& e) {
    return failed(SKIM_OTHER_ERROR, e.what());
  } catch (...) {
    return failed(SKIM_OTHER_ERROR, "an exception that is no std::exception");
  }
}

void expect(const void* pointer, const char* name) {
  SKIM_EXPECTS(pointer != nullptr, std::string(name) + " is NULL");
}

CommOptions with_timeout(double timeout_s) {
  SKIM_EXPECTS(timeout_s > 0.0 && timeout_s < 1e9,
               "timeout_s: must be in (0, 1e9), not " + std::to_string(timeout_s));
  CommOptions options;
  options.timeout =
      std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(timeout_s));
  return options;
}

skim_communicator* handle_of(std::shared_ptr<Communicator> communicator) {
  return new skim_communicator{std::move(communicator)};
}

GradView view_of(void* gradient, std::size_t n, int dtype) {
  GradView view;
  view.data = gradient;
  view.n = n;
  switch (dtype) {
    case SKIM_F32:
      view.dtype = DType::f32;
      return view;
    case SKIM_F16:
      view.dtype = DType::f16;
      return view;
    case SKIM_BF16:
      view.dtype = DType::bf16;
      return view;
  }
  throw InvalidArgument("dtype: must be SKIM_F32, SKIM_F16 or SKIM_BF16, not " +
                        std::to_string(dtype));
}

void put(const StepReport& from, skim_report* to) {
  if (to == nullptr) return;
  *to = {.n = from.n,
         .k = from.k,
         .sent_entries = from.sent_entries,
         .sum_entries = from.sum_entries,
         .sent_bytes = from.sent_bytes,
         .received_bytes = from.received_bytes,
         .rounds = from.rounds,
         .select_ns = from.select_ns,
         .exchange_ns = from.exchange_ns,
         .apply_ns = from.apply_ns,
         .dense = from.dense ? 1 : 0,
         .finite = from.finite ? 1 : 0};
}

}  // namespace

uint32_t skim_abi_version(void) { return SKIM_ABI_VERSION; }
const char* skim_version(void) { return SKIM_VERSION; }
const char* skim_last_error(void) { return last_error; }

// ---- groups of ranks ----------------------------------------------------------------------------

skim_status skim_in_process_group(int size, double timeout_s, skim_communicator** group) {
  return guarded([&] {
    expect(group, "group");
    std::vector<std::unique_ptr<skim_communicator>> handles;
    for (auto& communicator : make_in_process_group(size, with_timeout(timeout_s))) {
      handles.emplace_back(handle_of(std::move(communicator)));
    }
    for (std::size_t r = 0; r < handles.size(); ++r) group[r] = handles[r].release();
  });
}

skim_status skim_connect_mpi(double timeout_s, skim_communicator** communicator) {
  return guarded([&] {
    expect(communicator, "communicator");
    SKIM_EXPECTS(is_available(Backend::mpi),
                 "the library was built without MPI; build it with -DSKIM_MPI=ON");
    *communicator = handle_of(connect(Backend::mpi, with_timeout(timeout_s)));
  });
}

skim_status skim_communicator_over(const skim_transport* transport,
                                   skim_communicator** communicator) {
  return guarded([&] {
    expect(transport, "transport");
    expect(communicator, "communicator");
    SKIM_EXPECTS(transport->send != nullptr && transport->receive != nullptr,
                 "transport: send or receive is NULL");
    ByteStreams streams;
    streams.send = [t = *transport](int to, Bytes data) {
      return t.send(t.context, to, data.data(), data.size());
    };
    streams.receive = [t = *transport](int from, std::span<std::byte> data) {
      return t.receive(t.context, from, data.data(), data.size());
    };
    *communicator = handle_of(make_stream_communicator(transport->rank, transport->size,
                                                       transport->host, std::move(streams)));
  });
}

int skim_communicator_rank(const skim_communicator* communicator) {
  return communicator == nullptr ? -1 : communicator->own->rank();
}
int skim_communicator_size(const skim_communicator* communicator) {
  return communicator == nullptr ? -1 : communicator->own->size();
}
void skim_communicator_abort(skim_communicator* communicator, int culprit) {
  if (communicator != nullptr) communicator->own->abort(culprit);
}
void skim_communicator_free(skim_communicator* communicator) { delete communicator; }

// ---- reducers -----------------------------------------------------------------------------------

skim_status skim_reducer_new(skim_communicator* communicator, const char* options,
                             skim_reducer** reducer) {
  return guarded([&] {
    expect(communicator, "communicator");
    expect(reducer, "reducer");
    c_api::ReducerSetup setup = c_api::read_reducer_options(options == nullptr ? "" : options);
    ReducerParts parts;
    parts.schedule = std::move(setup.schedule);
    *reducer = new skim_reducer{communicator->own,
                                {std::move(setup.options), std::move(parts), *communicator->own}};
  });
}
void skim_reducer_free(skim_reducer* reducer) { delete reducer; }

skim_status skim_reducer_set_layout(skim_reducer* reducer, const skim_parameter* parameters,
                                    size_t count) {
  return guarded([&] {
    expect(reducer, "reducer");
    if (count > 0) expect(parameters, "parameters");
    std::vector<Bucket> buckets;
    for (const skim_parameter& p : std::span(parameters, count)) {
      expect(p.name, "parameters: a name");
      auto bucket = std::ranges::find(buckets, p.slot, &Bucket::slot);
      if (bucket == buckets.end()) bucket = buckets.insert(bucket, Bucket{p.slot, {}});
      const std::size_t offset = bucket->parameters.empty() ? 0
                                                            : bucket->parameters.back().offset +
                                                                  bucket->parameters.back().length;
      bucket->parameters.push_back({p.name, offset, p.length});
    }
    reducer->own.set_layout(buckets);
  });
}

skim_status skim_reducer_reduce(skim_reducer* reducer, uint32_t slot, void* gradient, size_t n,
                                int dtype, skim_report* report) {
  return guarded([&] {
    expect(reducer, "reducer");
    put(reducer->own.reduce(slot, view_of(gradient, n, dtype)), report);
  });
}

skim_status skim_reducer_start(skim_reducer* reducer, uint32_t slot, void* gradient, size_t n,
                               int dtype, uint64_t* ticket) {
  return guarded([&] {
    expect(reducer, "reducer");
    expect(ticket, "ticket");
    *ticket = reducer->own.start(slot, view_of(gradient, n, dtype));
  });
}
skim_status skim_reducer_wait(skim_reducer* reducer, uint64_t ticket, skim_report* report) {
  return guarded([&] {
    expect(reducer, "reducer");
    put(reducer->own.wait(ticket), report);
  });
}

skim_status skim_reducer_end_step(skim_reducer* reducer, double epoch, int* apply) {
  return guarded([&] {
    expect(reducer, "reducer");
    const bool is_good = reducer->own.end_step(epoch);
    if (apply != nullptr) *apply = is_good ? 1 : 0;
  });
}
skim_status skim_reducer_rollback_step(skim_reducer* reducer, double epoch) {
  return guarded([&] {
    expect(reducer, "reducer");
    reducer->own.rollback_step(epoch);
  });
}

skim_status skim_reducer_residual(skim_reducer* reducer, uint32_t slot, float* residual, size_t n) {
  return guarded([&] {
    expect(reducer, "reducer");
    if (n > 0) expect(residual, "residual");
    SKIM_EXPECTS(reducer->own.is_between_steps(),
                 "residual: a step or a ticket is open; call skim_reducer_wait, then end the step");
    const std::size_t length = reducer->own.local().size(slot);
    SKIM_EXPECTS(n == length, "residual: slot " + std::to_string(slot) + " has " +
                                  std::to_string(length) + " entries, not " + std::to_string(n));
    std::vector<float> kept = reducer->own.residual(slot);
    kept.resize(n);
    std::ranges::copy(kept, residual);
  });
}

skim_status skim_reducer_save(const skim_reducer* reducer, skim_state* state) {
  return guarded([&] {
    expect(reducer, "reducer");
    expect(state, "state");
    std::ostringstream out;
    reducer->own.save(out);
    const std::string_view bytes = out.view();
    void* const data = std::malloc(bytes.size());
    if (data == nullptr) throw std::bad_alloc();
    std::memcpy(data, bytes.data(), bytes.size());
    *state = {data, bytes.size()};
  });
}
void skim_state_free(skim_state* state) {
  if (state == nullptr) return;
  std::free(state->data);
  *state = {nullptr, 0};
}
skim_status skim_reducer_load(skim_reducer* reducer, const skim_state* states, size_t ranks,
                              int strict, const char** differences) {
  return guarded([&] {
    expect(reducer, "reducer");
    expect(states, "states");
    std::vector<std::istringstream> streams;
    for (const skim_state& state : std::span(states, ranks)) {
      expect(state.data, "states: data");
      streams.emplace_back(std::string(static_cast<const char*>(state.data), state.bytes));
    }
    std::vector<std::istream*> of_old_ranks;
    for (std::istringstream& stream : streams) of_old_ranks.push_back(&stream);
    last_differences = reducer->own.load(of_old_ranks, strict != 0).text();
    if (differences != nullptr) *differences = last_differences.c_str();
  });
}
