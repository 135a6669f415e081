#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "detail/open.hpp"
#include "request.hpp"

namespace kvrelay {

/// Many requests at once under dynamic batching; kvrelay.Engine in Python. Any number of threads may use it at once.
class Engine {
 public:
  /// Opens the bundle in the folder `bundle`; the first Pipeline or Engine of a process starts the interpreter.
  explicit Engine(const std::filesystem::path& bundle, const EngineOptions& options = {}) {
    std::uint64_t epoch = 0;
    detail::Ref engine = detail::open("Engine", bundle, options, epoch);
    core_ = std::make_shared<detail::EngineCore>(std::move(engine), epoch);
    detail::in_python(epoch, [&] {
      const detail::Attributes attribute{core_->engine.get()};
      attribute("drafts", facts_.drafts);
      attribute("precision", facts_.precision);
      attribute("threads", facts_.threads);
      attribute("max_batch", facts_.max_batch);
      attribute("kv_bytes", facts_.kv_bytes);
    });
    detail::stop_at_exit();
  }

  /// Ends every request, as cancelled, and joins the engine's thread.
  ~Engine() {
    try {
      if (core_ != nullptr) close();
    } catch (const std::exception&) {
      // Work was stopped already, or the interpreter is gone.
    }
  }
  Engine(Engine&&) noexcept = default;
  Engine& operator=(Engine&& other) noexcept {
    const Engine old(std::move(*this));
    core_ = std::move(other.core_);
    facts_ = std::move(other.facts_);
    return *this;
  }

  /// Queues a request, which runs on the engine's thread from now on.
  Request submit(const Prompt& prompt, const Options& options = {}) const {
    auto request = std::make_unique<detail::RequestCore>();
    request->of_engine = true;
    request->epoch = used().epoch;
    request->ran = {core_, &core_->ran};
    {
      detail::Clock clock(request->facade_ns);
      detail::in_python(request->epoch, [&] {
        const detail::PromptArgument argument(prompt);
        const pybind11::dict arguments = checked(options);
        const pybind11::object call = used().engine.get().attr("submit");
        request->object = detail::Ref(clock.python([&] { return call(argument.object, **arguments); }));
      });
    }
    return Request(std::move(request));
  }

  /// Refuses, as Error, what submit() would refuse of a request, and queues nothing.
  void check(const Prompt& prompt, const Options& options = {}) const {
    detail::in_python(used().epoch, [&] {
      const detail::PromptArgument argument(prompt);
      used().engine.get().attr("check")(argument.object, **checked(options));
    });
  }

  /// What the batch did so far.
  EngineStats stats() const {
    return detail::in_python(used().epoch, [&] {
      EngineStats stats;
      EngineStats::visit(stats, detail::Attributes{used().engine.get().attr("stats")});
      return stats;
    });
  }

  /// What the bits of a deterministic output depend on here besides the request, as JSON; see Receipt::conditions.
  std::string conditions() const {
    return detail::in_python(used().epoch, [&] {
      std::string json;
      detail::read(used().engine.get().attr("conditions").attr("model_dump_json")(), json);
      return json;
    });
  }

  /// Ends every request that has not ended, as cancelled, and joins the engine's thread. Later calls do nothing.
  void close() {
    detail::in_python(used().epoch, [&] { used().engine.get().attr("close")(); });
  }

  const std::vector<std::string>& drafts() const noexcept { return facts_.drafts; }
  const std::string& precision() const noexcept { return facts_.precision; }
  std::int64_t threads() const noexcept { return facts_.threads; }
  std::int64_t max_batch() const noexcept { return facts_.max_batch; }
  std::int64_t kv_bytes() const noexcept { return facts_.kv_bytes; }

 private:
  struct Facts {
    std::vector<std::string> drafts;
    std::string precision;
    std::int64_t threads = 0;
    std::int64_t max_batch = 0;
    std::int64_t kv_bytes = 0;
  };

  static pybind11::dict checked(const Options& options) {
    if (options.trace)
      throw Error(ErrorKind::parameter, "", "trace: an option of Pipeline::generate(); an Engine has no windows of one request");
    detail::Arguments arguments(options);
    arguments.made["deterministic"] = options.deterministic;
    return arguments.made;
  }

  const detail::EngineCore& used() const {
    if (core_ == nullptr) throw Error(ErrorKind::parameter, "", "this Engine was moved from");
    return *core_;
  }

  std::shared_ptr<detail::EngineCore> core_;
  Facts facts_;
};

}  // namespace kvrelay
