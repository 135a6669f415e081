#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "call.hpp"

namespace kvrelay::detail {

struct EngineCore {
  Ref engine;
  std::uint64_t epoch;
  std::atomic<bool> ran{false};

  EngineCore(Ref made, std::uint64_t made_in) : engine(std::move(made)), epoch(made_in) {
    State& state = State::get();
    std::lock_guard<std::mutex> lock(state.mutex);
    state.engines.insert(this);
  }
  ~EngineCore() {
    State& state = State::get();
    if (state.lost() || state.ends_here()) return;
    std::lock_guard<std::mutex> lock(state.mutex);
    state.engines.erase(this);
  }
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;
};

/// Ends all work of this module: threads that are in Python get an exception there as soon as the engine run at hand
/// is over, engines are closed and their threads joined. A thread that is in a callback is not waited for.
///
/// A thread that opens a bundle ends at the next thing that it would tell a Progress, or when it is done: while it
/// starts a Python thread, CPython could raise the exception in that one, and the start would be waited for for ever.
///
/// Returns whether all of it ended within `limit`; without a limit it waits for as long as it takes.
inline bool stop(State& state, bool for_exit, std::optional<std::chrono::seconds> limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit.value_or(std::chrono::hours(24 * 365));
  WithoutGil none;
  std::unique_lock<std::timed_mutex> one_at_a_time(state.stop_mutex, deadline);
  if (!one_at_a_time.owns_lock()) return false;
  const PyGILState_STATE gil = PyGILState_Ensure();
  bool closed = true;
  try {
    py::list engines;
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      ++state.stops;
      if (!for_exit) ++state.epoch;
      for (const auto& [thread, stay] : state.inside)
        if (thread != State::thread() && stay.opening == 0) PyThreadState_SetAsyncExc(thread, state.shutdown);
      for (EngineCore* core : state.engines) engines.append(core->engine.get());
    }
    const std::chrono::duration<double> seconds = deadline - std::chrono::steady_clock::now();
    closed = py::handle(state.bridge).attr("close_engines")(engines, seconds.count()).cast<bool>();
  } catch (py::error_already_set&) {
    closed = false;
  }
  PyGILState_Release(gil);
  std::unique_lock<std::mutex> lock(state.mutex);
  return state.left.wait_until(lock, deadline, [&] { return state.stopped(); }) && closed;
}

[[noreturn]] inline void leave_at_once(int status) {
  std::fflush(nullptr);
  _exit(status);
}

/// The exit handler. ONNX Runtime's own handlers take away what a running engine needs, so engines stop before them.
inline void at_exit(int status, void* process) {
  State& state = State::get();
  if (state.gone || state.exiting) return;
  state.exit_thread = State::thread();
  state.exiting = true;
  // A forked child has a copy of everything but the threads, which ONNX Runtime's handlers would wait for.
  if (static_cast<pid_t>(reinterpret_cast<std::intptr_t>(process)) != getpid()) leave_at_once(status);
  constexpr std::chrono::seconds limit(30);
  if (stop(state, true, limit)) return;
  std::fprintf(stderr, "kvrelay: an engine run did not end within %d s of exit(): leaving without further handlers\n",
               static_cast<int>(limit.count()));
  leave_at_once(status);
}

/// Registers the exit handler. Handlers run last one first, and ONNX Runtime goes on registering its own while engines
/// are loaded and first run: this is called after both, for each Pipeline and Engine.
inline void stop_at_exit() {
  on_exit(at_exit, reinterpret_cast<void*>(static_cast<std::intptr_t>(getpid())));
}

}  // namespace kvrelay::detail
