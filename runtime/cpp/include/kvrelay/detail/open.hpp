#pragma once

#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "convert.hpp"
#include "start.hpp"

namespace kvrelay::detail {

/// What Python tells its progress to while a bundle is opened: the host's Progress, if there is one. It also ends the
/// opening when work is stopped. Python keeps the function, which does nothing once the bundle is open.
class ProgressBridge {
 public:
  ProgressBridge(const Progress& progress, std::uint64_t stops) : slot_(std::make_shared<Slot>()) {
    slot_->progress = &progress;
    slot_->stops = stops;
  }
  ~ProgressBridge() { slot_->progress = nullptr; }
  ProgressBridge(const ProgressBridge&) = delete;
  ProgressBridge& operator=(const ProgressBridge&) = delete;

  py::object function() const {
    return py::cpp_function([slot = slot_](const py::str& line) {
      if (slot->progress == nullptr) return;
      const std::string text = utf8_of(line);
      try {
        if (*slot->progress) outside([&] { (*slot->progress)(text); });
        if (slot->stops != State::get().stops) throw shutdown_error();
      } catch (...) {
        slot->error = std::current_exception();
        PyErr_SetNone(State::get().shutdown);  // nothing in Python catches it
        throw py::error_already_set();
      }
    });
  }

  /// What ended the opening, if it was the callback or a stop. Python may keep the function: not the host's exception.
  void rethrow() const {
    if (const std::exception_ptr error = std::exchange(slot_->error, nullptr)) std::rethrow_exception(error);
  }

 private:
  struct Slot {
    const Progress* progress = nullptr;
    std::uint64_t stops = 0;
    std::exception_ptr error;
  };

  std::shared_ptr<Slot> slot_;
};

/// Returns kvrelay.Pipeline or kvrelay.Engine for a bundle, and in `epoch` when it was made.
template <class Options>
Ref open(const char* name, const std::filesystem::path& bundle, const Options& options, std::uint64_t& epoch) {
  start();
  State& state = State::get();
  epoch = state.epoch;
  std::optional<ProgressBridge> progress;
  try {
    return in_python(
        epoch,
        [&] {
          Arguments arguments(options);
          progress.emplace(options.progress, state.stops);
          arguments.made["progress"] = progress->function();
          return Ref(py::handle(state.package).attr(name)(path_of(bundle), **arguments.made));
        },
        true);
  } catch (const Error&) {
    if (progress) progress->rethrow();
    throw;
  }
}

}  // namespace kvrelay::detail
