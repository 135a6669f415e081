#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "detail/open.hpp"
#include "logits.hpp"
#include "request.hpp"

namespace kvrelay {

/// Draft-verify generation from a bundle; kvrelay.Pipeline in Python. Any number of threads may use it at once.
class Pipeline {
 public:
  /// Opens the bundle in the folder `bundle`; the first Pipeline or Engine of a process starts the interpreter.
  explicit Pipeline(const std::filesystem::path& bundle, const PipelineOptions& options = {}) {
    core_ = std::make_shared<Core>();
    core_->pipeline = detail::open("Pipeline", bundle, options, core_->epoch);
    detail::in_python(core_->epoch, [&] {
      const detail::Attributes attribute{core_->pipeline.get()};
      attribute("drafts", drafts_);
      attribute("precision", precision_);
      attribute("threads", threads_);
    });
    detail::stop_at_exit();
  }

  /// Returns the whole answer; each piece of it is given to `on_text` as soon as it is certain, on this thread.
  Result generate(const Prompt& prompt, const Options& options = {}, const OnText& on_text = nullptr) const {
    const detail::Attached attached;
    Request request = stream(prompt, options);
    return request.stream(on_text);
  }

  /// Returns a request that runs as it is read.
  Request stream(const Prompt& prompt, const Options& options = {}) const {
    if (options.deterministic)
      throw Error(ErrorKind::parameter, "",
                  "deterministic=true: an option of Engine::submit(); a Pipeline serves one request at a time, and with "
                  "exact=true, the default, its output is that of deterministic requests");
    auto request = std::make_unique<detail::RequestCore>();
    request->epoch = used().epoch;
    request->ran = {core_, &core_->ran};
    request->trace = options.trace;
    {
      detail::Clock clock(request->facade_ns);
      detail::in_python(request->epoch, [&] {
        detail::Arguments arguments(options);
        if (options.trace) {
          pybind11::list events;
          arguments.made["trace"] = events.attr("append");
          request->events = detail::Ref(std::move(events));
        }
        const detail::PromptArgument argument(prompt);
        const pybind11::object call = used().pipeline.get().attr("stream");
        request->object = detail::Ref(clock.python([&] { return call(argument.object, **arguments.made); }));
      });
    }
    return Request(std::move(request));
  }

  /// Returns the token ids of a prompt, as generate() would process them.
  std::vector<std::int64_t> encode(const Prompt& prompt) const {
    return detail::in_python(used().epoch, [&] {
      const detail::PromptArgument argument(prompt);
      std::vector<std::int64_t> ids;
      detail::read(used().pipeline.get().attr("encode")(argument.object), ids);
      return ids;
    });
  }

  /// Returns the target's scores of the token that follows `prompt`, before any option: to choose among given answers,
  /// say. Nothing is copied on the way from Python.
  Logits logits(const Prompt& prompt) const {
    return detail::in_python(used().epoch, [&] {
      const detail::PromptArgument argument(prompt);
      const pybind11::handle bridge = detail::State::get().bridge;
      return Logits(bridge.attr("next_logits")(used().pipeline.get(), argument.object));
    });
  }

  const std::vector<std::string>& drafts() const noexcept { return drafts_; }
  const std::string& precision() const noexcept { return precision_; }
  std::int64_t threads() const noexcept { return threads_; }

 private:
  struct Core {
    detail::Ref pipeline;
    std::uint64_t epoch = 0;
    std::atomic<bool> ran{false};
  };

  const Core& used() const {
    if (core_ == nullptr) throw Error(ErrorKind::parameter, "", "this Pipeline was moved from");
    return *core_;
  }

  std::shared_ptr<Core> core_;
  std::vector<std::string> drafts_;
  std::string precision_;
  std::int64_t threads_ = 0;
};

}  // namespace kvrelay
