// Callbacks: they may throw, cancel, call back, be slow, end what calls them, and be destroyed on any thread.

#include <doctest/doctest.h>

#include <functional>
#include <memory>

#include "helpers.hpp"

using namespace helpers;

namespace {

struct Mine {
  int value;
};

/// Both ways to an answer: `run(on_text)` on a pipeline and on an engine.
template <class Check>
void on_both(Check check) {
  const kvrelay::Pipeline pipe(bundle(), drafting());
  const kvrelay::Engine engine(bundle(), serving());
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("callback");
    check([&](const kvrelay::OnText& on_text) { return pipe.generate({50, 60, 70}, length(40), on_text); });
    check([&](const kvrelay::OnText& on_text) { return engine.submit({50, 60, 70}, length(40)).stream(on_text); });
  }
}

}  // namespace

TEST_CASE("what a callback throws comes out unchanged, and the next generation is whole") {
  on_both([](auto run) {
    const kvrelay::Result wanted = run(nullptr);
    for (int i = 0; i < 3; ++i) {
      int value = 0;
      try {
        run([&](std::string_view) { throw Mine{7}; });
      } catch (const Mine& mine) {
        value = mine.value;
      }
      CHECK(value == 7);
    }
    CHECK(run(nullptr).token_ids == wanted.token_ids);
  });
}

TEST_CASE("an empty function is no callback") {
  const kvrelay::Pipeline pipe(bundle(), plain());
  const std::function<void(std::string_view)> none;
  CHECK(pipe.generate({50, 60, 70}, length(4), none).token_ids.size() == 4);
  CHECK(!kvrelay::OnText(none));
  CHECK(kvrelay::OnText([](std::string_view) {}));
}

TEST_CASE("a callback may cancel its own request") {
  const auto cancel = [](std::string_view, kvrelay::Request& request) { request.cancel(); };
  const kvrelay::Pipeline pipe(bundle(), drafting());
  const kvrelay::Engine engine(bundle(), serving());
  int cancelled = 0;
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("cancel in a callback");
    const kvrelay::Result of_pipe = pipe.generate({50, 60, 70}, length(40), cancel);
    CHECK(of_pipe.finish_reason == "cancelled");
    CHECK(of_pipe.token_ids.size() < 40);
    // An engine generates whether or not somebody reads: now and then all is there before the first callback.
    const kvrelay::Result of_engine = engine.submit({50, 60, 70}, length(40)).stream(cancel);
    if (of_engine.finish_reason == "cancelled") ++cancelled;
    CHECK((of_engine.finish_reason == "cancelled") == (of_engine.token_ids.size() < 40));
  }
  CHECK(cancelled > 0);
}

TEST_CASE("a callback may call back into generate") {
  const kvrelay::Pipeline pipe(bundle(), drafting());
  const kvrelay::Engine engine(bundle(), serving());
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("nested");
    int inner = 0;
    const kvrelay::Result outer = pipe.generate(case_prompt(2), case_options(2), [&](std::string_view) {
      if (inner++ > 2) return;
      pipe.generate(case_prompt(4), case_options(4), [&](std::string_view) {
        kvrelay::Options options = case_options(5);
        options.deterministic = true;
        if (inner == 1) CHECK(equals(engine.submit(case_prompt(5), options).result(), references()[5]));
      });
      CHECK(equals(pipe.generate(case_prompt(4), case_options(4)), references()[4]));
    });
    CHECK(equals(outer, references()[2]));
    CHECK(inner > 0);
  }
}

TEST_CASE("a slow callback holds up nobody else") {
  const kvrelay::Pipeline pipe(bundle(), plain());
  const Watchdog watchdog("slow callback");
  std::mutex mutex;
  std::condition_variable changed;
  bool inside = false, go_on = false;
  std::thread slow([&] {
    pipe.generate({50, 60, 70}, length(5), [&](std::string_view) {
      std::unique_lock<std::mutex> lock(mutex);
      inside = true;
      changed.notify_all();
      changed.wait(lock, [&] { return go_on; });
    });
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return inside; });
  }
  // The callback waits for this thread: were the GIL held in it, this generation would never end.
  CHECK(equals(pipe.generate(case_prompt(1), case_options(1)), references()[1]));
  {
    std::lock_guard<std::mutex> lock(mutex);
    go_on = true;
  }
  changed.notify_all();
  slow.join();
}

TEST_CASE("a callback may destroy the pipeline or the engine that calls it") {
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("destroyed by its callback");
    auto pipe = std::make_unique<kvrelay::Pipeline>(bundle(), plain());
    kvrelay::Request of_pipe = pipe->stream(case_prompt(1), case_options(1));
    CHECK(equals(of_pipe.stream([&](std::string_view) { pipe.reset(); }), references()[1]));

    auto engine = std::make_unique<kvrelay::Engine>(bundle(), serving());
    kvrelay::Request of_engine = engine->submit({50, 60, 70}, length(200));
    const kvrelay::Result result = of_engine.stream([&](std::string_view) { engine.reset(); });
    CHECK(result.finish_reason == "cancelled");
    CHECK(engine == nullptr);
  }
}

TEST_CASE("the host may destroy its std::function on another thread, before, during and after the call") {
  on_both([](auto run) {
    auto heavy = std::make_shared<std::string>(1000, 'x');  // freed memory would be noticed
    auto seen = std::make_shared<std::atomic<int>>(0);
    auto callback = std::make_unique<std::function<void(std::string_view)>>([heavy, seen](std::string_view) {
      *seen += heavy->back() == 'x';
    });
    std::thread thread;
    std::atomic<bool> started{false};
    run([&, copy = *callback](std::string_view piece) {
      copy(piece);
      if (!started.exchange(true)) thread = std::thread([&] { callback.reset(); });
    });
    thread.join();
    CHECK(callback == nullptr);
    CHECK(*seen > 0);
    heavy.reset();
  });
}

TEST_CASE("a trace gets every window, in order, and may throw") {
  const kvrelay::Pipeline pipe(bundle(), drafting());
  std::vector<kvrelay::TraceEvent> events;
  kvrelay::Options options = length(40);
  options.trace = [&](const kvrelay::TraceEvent& event) { events.push_back(event); };
  const kvrelay::Result result = pipe.generate({50, 60, 70}, options);
  std::vector<std::int64_t> committed;
  for (const kvrelay::TraceEvent& event : events)
    committed.insert(committed.end(), event.committed.begin(), event.committed.end());
  CHECK(committed == result.token_ids);
  REQUIRE(events.size() == static_cast<std::size_t>(1 + result.stats.passes));
  CHECK(events[0].pass == "prefill");
  CHECK(events[0].kv_before == 3);
  CHECK(events[1].draft == "cousin");
  CHECK(events[1].window == 8);
  CHECK(events[1].kv_before == 3);
  CHECK(events[1].kv_after_rollback == 3 + static_cast<std::int64_t>(events[1].committed.size()));

  options.trace = [](const kvrelay::TraceEvent&) { throw Mine{8}; };
  CHECK_THROWS_AS(pipe.generate({50, 60, 70}, options), Mine);
  options.trace = nullptr;
  CHECK(pipe.generate({50, 60, 70}, options).token_ids == result.token_ids);
}

TEST_CASE("progress is told while a bundle is opened, may use the library and may end it") {
  const kvrelay::Pipeline other(bundle(), plain());
  kvrelay::EngineOptions options = serving();
  // A draft that no other test opens: there is something to load.
  options.draft = "skip";
  int told = 0;
  options.progress = [&](std::string_view text) {
    CHECK(!text.empty());
    if (told++ == 0) CHECK(equals(other.generate(case_prompt(0), case_options(0)), references()[0]));
  };
  { const kvrelay::Engine engine(bundle(), options); }
  CHECK(told > 0);
  options.draft = "none";
  options.window = 8;
  options.group = 2;
  options.progress = [](std::string_view) { throw Mine{9}; };
  CHECK_THROWS_AS(kvrelay::Engine(bundle(), options), Mine);
  options.progress = nullptr;
  CHECK_NOTHROW(kvrelay::Engine(bundle(), options));
}

TEST_CASE("a callback may call shutdown()") {
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("shutdown in a callback");
    const kvrelay::Pipeline pipe(bundle(), plain());
    kvrelay::ErrorKind kind{};
    try {
      pipe.generate({50, 60, 70}, length(40), [](std::string_view) { kvrelay::shutdown(); });
    } catch (const kvrelay::Error& error) {
      kind = error.kind();
    }
    CHECK(kind == kvrelay::ErrorKind::shutdown);
  }
}
