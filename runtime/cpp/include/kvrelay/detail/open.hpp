#pragma once

#include <exception>
#include <filesystem>
#include <memory>
#include <utility>

#include "convert.hpp"
#include "start.hpp"

namespace kvrelay::detail {

/// A Progress that Python may call while a bundle is opened, and not after: Python keeps the function it was given.
class ProgressBridge {
 public:
  explicit ProgressBridge(const Progress& progress) : slot_(std::make_shared<Slot>()) { slot_->target = &progress; }
  ~ProgressBridge() { slot_->target = nullptr; }
  ProgressBridge(const ProgressBridge&) = delete;
  ProgressBridge& operator=(const ProgressBridge&) = delete;

  py::object function() const {
    return py::cpp_function([slot = slot_](const std::string& text) {
      if (slot->target == nullptr) return;
      try {
        outside([&] { (*slot->target)(text); });
      } catch (...) {
        slot->error = std::current_exception();
        PyErr_SetNone(State::get().shutdown);  // ends the opening: nothing in Python catches it
        throw py::error_already_set();
      }
    });
  }

  /// What the callback threw, if that ended the opening.
  void rethrow() const {
    if (slot_->error) std::rethrow_exception(slot_->error);
  }

 private:
  struct Slot {
    const Progress* target = nullptr;
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
  const ProgressBridge progress(options.progress);
  try {
    return in_python(epoch, [&] {
      Arguments arguments(options);
      if (options.progress) arguments.made["progress"] = progress.function();
      return Ref(py::handle(state.package).attr(name)(path_of(bundle), **arguments.made));
    });
  } catch (const Error&) {
    progress.rethrow();
    throw;
  }
}

}  // namespace kvrelay::detail
