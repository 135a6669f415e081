#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "../error.hpp"

namespace kvrelay::detail {

namespace py = pybind11;

struct EngineCore;

constexpr std::uint64_t any_epoch = UINT64_MAX;  // for objects that may be used, or dropped, after shutdown() too

/// Puts this thread to rest for good: the process is ending, and it must touch neither Python nor the host again.
[[noreturn]] inline void park() {
  for (;;) pause();
}

inline Error shutdown_error() {
  return {ErrorKind::shutdown, "", "kvrelay::shutdown() ended this object: make a new one, the interpreter goes on"};
}

/// How deep a thread is in Python.
struct Stay {
  int calls = 0;    // from C++
  int opening = 0;  // of these, the ones that make a Pipeline or Engine
  std::uint64_t since = 0;  // State::stops when it came
};

/// What this module of the process (a program or a shared library) has to do with Python.
///
/// Two rules keep it free of deadlocks. `mutex` is held for a few instructions, never while the GIL is waited for; so
/// it may be taken with the GIL held. And no thread holds the GIL while it waits for another C++ thread.
struct State {
  /// The one of this module. It is never destroyed: threads may still rest in it while the process ends.
  __attribute__((visibility("hidden"))) static State& get() {
    static State* state = new State;
    return *state;
  }

  std::mutex mutex;
  std::condition_variable left;                // a thread has left Python
  std::map<unsigned long, Stay> inside;        // by Python's id of the thread
  std::set<EngineCore*> engines;               // open ones
  std::uint64_t stops = 0;                     // how often work was stopped; written with the GIL held too
  std::atomic<std::uint64_t> epoch{0};         // raised by shutdown(): what was made before may not be used after
  std::atomic<bool> exiting{false};            // exit() has begun
  std::atomic<unsigned long> exit_thread{0};   // Python's id of the thread that called it
  std::atomic<bool> gone{false};               // the host is finalising the interpreter that it owns
  std::atomic<bool> forked{false};             // this is a child of the process in which all of this was made

  std::mutex start_mutex;
  std::atomic<bool> started{false};
  std::timed_mutex stop_mutex;
  PyObject* package = nullptr;   // the module kvrelay
  PyObject* bridge = nullptr;    // the module kvrelay.cpp.bridge
  PyObject* shutdown = nullptr;  // its class Shutdown

  static unsigned long thread() noexcept { return PyThread_get_thread_ident(); }

  /// Whether this thread is the one that runs the exit handlers: Python's objects are then left as they are.
  bool ends_here() const noexcept { return exiting && exit_thread == thread(); }

  /// Whether another thread is ending the process: this one has to park.
  bool others_end() const noexcept { return exiting && exit_thread != thread(); }

  /// Whether Python is out of reach for good: what it owns is left to the end of the process.
  bool lost() const noexcept { return gone || forked; }

  /// Whether what was made in the epoch `made_in` may not be used any more.
  bool refuses(std::uint64_t made_in) const noexcept { return lost() || exiting || made_in < epoch; }

  /// Throws if what was made in the epoch `made_in` may not be used any more; never returns once the process ends.
  void refuse(std::uint64_t made_in) const {
    if (forked)
      throw Error(ErrorKind::interpreter, "",
                  "this process was forked from one that uses kvrelay, whose threads it lacks: fork before kvrelay is "
                  "first used, or start the child by exec");
    if (others_end()) park();
    if (gone)
      throw Error(ErrorKind::interpreter, "",
                  "the host finalised the interpreter that kvrelay ran in; numpy and others cannot be loaded twice in a "
                  "process: keep the interpreter until the process ends");
    if (refuses(made_in)) throw shutdown_error();
  }

  /// Counts this thread in and returns `stops`.
  std::uint64_t enter(std::uint64_t made_in, bool opening) {
    for (;;) {
      refuse(made_in);
      std::lock_guard<std::mutex> lock(mutex);
      if (refuses(made_in)) continue;  // a stop came before the lock: it does not count this thread, nor wait for it
      return_to(opening);
      return stops;
    }
  }

  /// Counts this thread in again after its leave(). `mutex` is held.
  void return_to(bool opening) {
    Stay& stay = inside[thread()];
    if (stay.calls++ == 0) stay.since = stops;
    stay.opening += opening;
  }

  /// Counts this thread out; returns whether it is in no other call.
  bool leave(bool opening) noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = inside.find(thread());
    found->second.opening -= opening;
    const bool last = --found->second.calls == 0;
    if (last) inside.erase(found);
    left.notify_all();
    return last;
  }

  /// Whether no other thread is inside that came before the last stop; others may make new work. `mutex` is held.
  bool stopped() const {
    for (const auto& [other, stay] : inside)
      if (other != thread() && stay.since < stops) return false;
    return true;
  }
};

}  // namespace kvrelay::detail
