// What is made, ended and made again in one process.

#include <doctest/doctest.h>

#include <memory>

#include "helpers.hpp"

using namespace helpers;

namespace {

template <class Code>
kvrelay::ErrorKind kind_of(Code code) {
  try {
    code();
  } catch (const kvrelay::Error& error) {
    return error.kind();
  }
  FAIL("no error");
  return {};
}

kvrelay::Options deterministic(int i) {
  kvrelay::Options options = case_options(i);
  options.deterministic = true;
  return options;
}

}  // namespace

TEST_CASE("pipelines and engines are made, used and destroyed three times in one process") {
  for (int i = 0; i < 3; ++i) {
    const Watchdog watchdog("made again");
    {
      const kvrelay::Pipeline pipe(bundle(), plain());
      CHECK(equals(pipe.generate(case_prompt(i), case_options(i)), references()[static_cast<std::size_t>(i)]));
    }
    kvrelay::Engine engine(bundle(), serving());
    CHECK(equals(engine.submit(case_prompt(i), deterministic(i)).result(), references()[static_cast<std::size_t>(i)]));
    if (i == 1) engine.close();
  }
}

TEST_CASE("requests outlive the pipeline and the engine that they came from") {
  std::optional<kvrelay::Request> of_pipe, of_engine;
  {
    const kvrelay::Pipeline pipe(bundle(), plain());
    of_pipe.emplace(pipe.stream(case_prompt(0), case_options(0)));
    const kvrelay::Engine engine(bundle(), serving());
    of_engine.emplace(engine.submit(case_prompt(1), deterministic(1)));
    CHECK(of_engine->wait_for(std::chrono::seconds(20)));
  }
  CHECK(equals(of_pipe->result(), references()[0]));
  CHECK(equals(of_engine->result(), references()[1]));
}

TEST_CASE("destroying a request gives its place to others") {
  const kvrelay::Pipeline pipe(bundle(), plain());
  kvrelay::EngineOptions options = serving();
  options.max_batch = 1;
  const kvrelay::Engine engine(bundle(), options);
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("dropped requests");
    {
      kvrelay::Request never_read = pipe.stream({50, 60, 70}, length(200));
      kvrelay::Request dropped = pipe.stream({50, 60, 70}, length(200));
      CHECK(dropped.next());
      kvrelay::Request running = engine.submit({50, 60, 70}, length(250));
      CHECK(running.next());
      kvrelay::Request waiting = engine.submit({50, 60, 70}, length(250));
    }
    CHECK(equals(engine.submit(case_prompt(1), deterministic(1)).result(), references()[1]));
  }
  CHECK(engine.stats().cancelled == 2 * repeats());
}

TEST_CASE("an engine that is destroyed ends its requests as cancelled") {
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("destroyed with requests");
    auto engine = std::make_unique<kvrelay::Engine>(bundle(), serving());
    std::vector<kvrelay::Request> requests;
    for (int i = 0; i < 6; ++i) requests.push_back(engine->submit({50, 60, 70}, length(250)));
    engine.reset();
    for (kvrelay::Request& request : requests) CHECK(request.result().finish_reason == "cancelled");
  }
}

TEST_CASE("shutdown ends what other threads are doing, and what is made afterwards works") {
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("shutdown");
    const kvrelay::Pipeline pipe(bundle(), drafting());
    kvrelay::Engine engine(bundle(), serving());
    std::atomic<int> ended{0}, running{0};
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    const auto forever = [&](auto generate) {
      return std::thread([&, generate] {
        const kvrelay::ErrorKind kind = kind_of([&] {
          for (;;) {
            generate();
            ++running;
          }
        });
        if (kind == kvrelay::ErrorKind::shutdown) ++ended;
      });
    };
    for (int t = 0; t < 2; ++t) {
      threads.push_back(forever([&] { pipe.generate({50, 60, 70}, length(30)); }));
      threads.push_back(forever([&] { engine.submit({50, 60, 70}, length(30)).stream([](std::string_view) {}); }));
      // New objects may be made while and after work is stopped: each comes to be, or throws.
      threads.emplace_back([&] {
        while (!over) {
          try {
            kvrelay::Engine(bundle(), serving()).submit({50, 60, 70}, length(3)).result();
          } catch (const kvrelay::Error& error) {
            CHECK(error.kind() == kvrelay::ErrorKind::shutdown);
          }
        }
      });
    }
    while (running < 6) std::this_thread::yield();
    kvrelay::shutdown();
    over = true;
    for (std::thread& thread : threads) thread.join();
    CHECK(ended == 4);

    CHECK(kind_of([&] { pipe.generate({1}); }) == kvrelay::ErrorKind::shutdown);
    CHECK(kind_of([&] { (void)engine.submit({1}); }) == kvrelay::ErrorKind::shutdown);
    CHECK(kind_of([&] { (void)engine.stats(); }) == kvrelay::ErrorKind::shutdown);
    kvrelay::shutdown();
    const kvrelay::Pipeline again(bundle(), plain());
    CHECK(equals(again.generate(case_prompt(3), case_options(3)), references()[3]));
  }
}

TEST_CASE("calls that begin while work is stopped are told so, and not that their engine is closed") {
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("submitting while work is stopped");
    const kvrelay::Engine engine(bundle(), serving());
    std::atomic<int> told{0}, running{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t)
      threads.emplace_back([&] {
        const kvrelay::ErrorKind kind = kind_of([&] {
          for (;; ++running) engine.submit({5}, length(1)).cancel();
        });
        if (kind == kvrelay::ErrorKind::shutdown) ++told;
      });
    while (running < 40) std::this_thread::yield();
    kvrelay::shutdown();
    for (std::thread& thread : threads) thread.join();
    CHECK(told == 8);
  }
}

TEST_CASE("what was moved from says so") {
  kvrelay::Pipeline pipe(bundle(), plain());
  const kvrelay::Pipeline moved = std::move(pipe);
  CHECK(kind_of([&] { pipe.generate({1}); }) == kvrelay::ErrorKind::parameter);
  kvrelay::Request request = moved.stream(case_prompt(2), case_options(2));
  kvrelay::Request taken = std::move(request);
  CHECK(kind_of([&] { request.next(); }) == kvrelay::ErrorKind::parameter);
  CHECK(equals(taken.result(), references()[2]));
  kvrelay::Engine engine(bundle(), serving());
  kvrelay::Engine other(bundle(), serving());
  kvrelay::Request open = other.submit({50, 60, 70}, length(250));
  other = std::move(engine);
  CHECK(open.result().finish_reason == "cancelled");
  CHECK(equals(other.submit(case_prompt(2), deterministic(2)).result(), references()[2]));
  CHECK(kind_of([&] { (void)engine.submit({1}); }) == kvrelay::ErrorKind::parameter);
}

TEST_CASE("errors may be kept and destroyed on a thread that knows nothing of Python") {
  std::exception_ptr kept;
  try {
    kvrelay::Pipeline("no such bundle");
  } catch (...) {
    kept = std::current_exception();
  }
  std::thread([kept = std::move(kept)]() mutable {
    CHECK(kind_of([&] { std::rethrow_exception(kept); }) == kvrelay::ErrorKind::bundle);
    kept = nullptr;
  }).join();
}
