#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "detail/convert.hpp"
#include "detail/start.hpp"
#include "result.hpp"

namespace kvrelay {

class Request;

namespace detail {

/// Adds the time from its making to its end, Python's share left out, to a request's account.
class Clock {
 public:
  using Time = std::chrono::steady_clock;
  explicit Clock(std::atomic<std::int64_t>& account) : account_(account), started_(Time::now()) {}
  ~Clock() {
    const auto spent = Time::now() - started_ - python_;
    account_ += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

  /// Returns what `body`, which does nothing but run Python, returns.
  template <class Body>
  auto python(Body&& body) -> decltype(body()) {
    struct Pause {
      Clock& clock;
      Time::time_point since = Time::now();
      ~Pause() { clock.python_ += Time::now() - since; }
    } pause{*this};
    return body();
  }

 private:
  std::atomic<std::int64_t>& account_;
  Time::time_point started_;
  Time::duration python_{0};
};

struct RequestCore {
  Ref object;                              // kvrelay.Stream of a Pipeline, or kvrelay.Handle of an Engine
  std::shared_ptr<std::atomic<bool>> ran;  // whether a request of the owner has ended; keeps the owner, too
  std::uint64_t epoch = 0;
  bool of_engine = false;
  Ref events;  // list that Python puts trace events in
  std::function<void(const TraceEvent&)> trace;
  std::atomic<bool> ended{false};
  std::atomic<std::int64_t> facade_ns{0};

  void end() {
    ended = true;
    if (!ran->exchange(true)) stop_at_exit();
  }

  /// The next piece, a new reference; null at the end, or with Python's error set.
  PyObject* pull() const {
    if (!of_engine) return PyIter_Next(object.get().ptr());
    return PyIter_Next(object.get().attr("stream")().ptr());  // ends with its one piece: other threads may read too
  }

  std::vector<TraceEvent> take_events() const {
    std::vector<TraceEvent> taken;
    if (!trace) return taken;
    for (py::handle event : events.get()) taken.push_back(event_of(py::reinterpret_borrow<py::dict>(event)));
    events.get().attr("clear")();
    return taken;
  }
};

}  // namespace detail

/// A callback for text: takes a piece, or a piece and the Request that it belongs to.
///
/// It is called on the thread that reads the request, which holds no lock then, and it never becomes a Python object:
/// it may throw, be slow, cancel, use the library, and be destroyed anywhere.
class OnText {
 public:
  OnText() = default;
  OnText(std::nullptr_t) {}

  template <class Code, std::enable_if_t<std::is_invocable_v<Code&, std::string_view, Request&>, int> = 0>
  OnText(Code code) : code_(std::move(code)) {}

  template <class Code,
            std::enable_if_t<std::is_invocable_v<Code&, std::string_view> && !std::is_same_v<Code, OnText>, int> = 0>
  OnText(Code code) {
    if constexpr (std::is_constructible_v<bool, const Code&>)  // an empty std::function is no callback
      if (!static_cast<bool>(code)) return;
    code_ = [code = std::move(code)](std::string_view piece, Request&) mutable { code(piece); };
  }

  explicit operator bool() const noexcept { return static_cast<bool>(code_); }
  void operator()(std::string_view piece, Request& request) const { code_(piece, request); }

 private:
  std::function<void(std::string_view, Request&)> code_;
};

/// One generation: an answer that is being made. Destroying it before its end cancels it.
///
/// A Pipeline's request runs on the thread that reads it, one thread at a time; an Engine's runs on the engine's thread
/// and may be read from any. All functions throw Error.
class [[nodiscard]] Request {
 public:
  Request(Request&&) noexcept = default;
  Request& operator=(Request&& other) noexcept {
    abandon();
    core_ = std::move(other.core_);
    return *this;
  }
  ~Request() { abandon(); }

  /// Waits for the next piece of text, never empty; none at the end. Each piece is given once.
  std::optional<std::string> next() {
    detail::RequestCore& core = used();
    std::optional<std::string> piece;
    std::vector<TraceEvent> events;
    {
      detail::Clock clock(core.facade_ns);
      detail::in_python(core.epoch, [&] {
        const auto found = pybind11::reinterpret_steal<pybind11::object>(clock.python([&] { return core.pull(); }));
        if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
        if (found) detail::read(found, piece.emplace());
        events = core.take_events();
      });
    }
    for (const TraceEvent& event : events) core.trace(event);
    if (!piece) core.end();
    return piece;
  }

  /// Runs or waits to the end and returns the generation; pieces not read until then are passed over.
  Result result() { return stream(nullptr); }

  /// Gives each piece that is still to come to `on_text`, on this thread, and returns the generation.
  /// What the callback throws comes out of here; the request can then be read on.
  Result stream(const OnText& on_text) {
    detail::RequestCore& core = used();
    const detail::Attached attached;
    if (on_text || !core.of_engine) {
      while (const std::optional<std::string> piece = next())
        if (on_text) on_text(*piece, *this);
    }
    Result result;
    {
      detail::Clock clock(core.facade_ns);
      result = detail::in_python(core.epoch, [&] {
        const auto made = clock.python([&] {
          const pybind11::object found = core.object.get().attr("result");
          return core.of_engine ? found() : found;
        });
        return detail::result_of(made);
      });
    }
    core.end();
    result.facade_seconds = static_cast<double>(core.facade_ns) * 1e-9;
    return result;
  }

  /// Waits for an Engine's request to end; returns whether it did.
  template <class Rep, class Period>
  bool wait_for(std::chrono::duration<Rep, Period> time) {
    detail::RequestCore& core = used();
    if (!core.of_engine)
      throw Error(ErrorKind::parameter, "", "wait_for(): a Pipeline's request runs only while it is read; use next()");
    const double seconds = std::chrono::duration<double>(time).count();
    return detail::in_python(core.epoch, [&] {
      const pybind11::handle bridge = detail::State::get().bridge;
      return bridge.attr("wait")(core.object.get(), seconds).template cast<bool>();
    });
  }

  /// Ends the generation after the pass at hand; it keeps what was committed. Any thread may call this, but no signal
  /// handler: set a flag there.
  void cancel() {
    detail::RequestCore& core = used();
    detail::in_python(core.epoch, [&] { core.object.get().attr("cancel")(); });
  }

  /// Whether it has ended; a Pipeline's request ends when it is read to its end.
  bool done() {
    detail::RequestCore& core = used();
    if (core.ended || !core.of_engine) return core.ended;
    return detail::in_python(core.epoch, [&] { return core.object.get().attr("done").cast<bool>(); });
  }

  /// `for (const std::string& piece : request)` reads it to its end.
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = std::string;
    using difference_type = std::ptrdiff_t;
    using pointer = const std::string*;
    using reference = const std::string&;

    explicit iterator(Request* request = nullptr) : request_(request) { advance(); }
    reference operator*() const { return *piece_; }
    pointer operator->() const { return &*piece_; }
    iterator& operator++() {
      advance();
      return *this;
    }
    void operator++(int) { advance(); }
    friend bool operator==(const iterator& a, const iterator& b) { return a.request_ == b.request_; }
    friend bool operator!=(const iterator& a, const iterator& b) { return !(a == b); }

   private:
    void advance() {
      if (request_ != nullptr && !(piece_ = request_->next())) request_ = nullptr;
    }
    Request* request_;
    std::optional<std::string> piece_;
  };
  iterator begin() { return iterator(this); }
  iterator end() { return iterator(); }

 private:
  friend class Pipeline;
  friend class Engine;
  explicit Request(std::unique_ptr<detail::RequestCore> core) : core_(std::move(core)) {}

  detail::RequestCore& used() const {
    if (core_ == nullptr) throw Error(ErrorKind::parameter, "", "this Request was moved from");
    return *core_;
  }

  void abandon() noexcept {
    if (core_ == nullptr || core_->ended) return;
    try {
      detail::in_python(core_->epoch, [&] { core_->object.get().attr(core_->of_engine ? "cancel" : "close")(); });
    } catch (const std::exception&) {
      // Work was stopped already, or the interpreter is gone.
    }
  }

  std::unique_ptr<detail::RequestCore> core_;
};

}  // namespace kvrelay
