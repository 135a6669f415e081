// Several C++ threads at once: no deadlock, and the bits of Python's serial runs.

#include <doctest/doctest.h>

#include "helpers.hpp"

using namespace helpers;

namespace {

/// Runs the cases on `count` threads that start together; returns how many differ from Python's.
template <class Generate>
int differences(int count, Generate generate) {
  std::atomic<int> next{0}, wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t)
    threads.emplace_back([&] {
      for (int i; (i = next++) < static_cast<int>(references().size());)
        if (!equals(generate(i), references()[static_cast<std::size_t>(i)])) ++wrong;
    });
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

}  // namespace

TEST_CASE("two and eight threads on one pipeline give Python's bits, under load") {
  const kvrelay::Pipeline pipe(bundle(), drafting());
  const Load load;
  for (int count : {2, 8})
    for (int repeat = 0; repeat < repeats(); ++repeat) {
      const Watchdog watchdog("pipeline on several threads");
      CHECK(differences(count, [&](int i) { return pipe.generate(case_prompt(i), case_options(i)); }) == 0);
    }
}

TEST_CASE("two and eight threads on one engine give Python's bits to deterministic requests, under load") {
  const kvrelay::Engine engine(bundle(), serving());
  const Load load;
  for (int count : {2, 8})
    for (int repeat = 0; repeat < repeats(); ++repeat) {
      const Watchdog watchdog("engine on several threads");
      CHECK(differences(count, [&](int i) {
              kvrelay::Options options = case_options(i);
              options.deterministic = true;
              kvrelay::Request other = engine.submit(case_prompt(i + 1), case_options(i + 1));
              return engine.submit(case_prompt(i), options).result();
            }) == 0);
    }
}

TEST_CASE("main waits in join() while another thread generates with a callback") {
  const kvrelay::Pipeline pipe(bundle(), drafting());
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("join");
    std::string streamed;
    kvrelay::Result result;
    std::thread worker([&] {
      result = pipe.generate(case_prompt(3), case_options(3), [&](std::string_view piece) { streamed += piece; });
    });
    worker.join();
    CHECK(equals(result, references()[3]));
    CHECK(streamed == result.text);
  }
}

TEST_CASE("several threads may read one engine's request, and each piece is given once") {
  const kvrelay::Engine engine(bundle(), serving());
  for (int repeat = 0; repeat < repeats(); ++repeat) {
    const Watchdog watchdog("readers");
    kvrelay::Request request = engine.submit({50, 60, 70}, length(60));
    std::atomic<std::size_t> bytes{0};
    std::vector<std::thread> readers;
    for (int t = 0; t < 3; ++t)
      readers.emplace_back([&] {
        while (const auto piece = request.next()) bytes += piece->size();
      });
    for (std::thread& reader : readers) reader.join();
    CHECK(bytes == request.result().text.size());
  }
}

TEST_CASE("another thread may cancel") {
  const kvrelay::Pipeline pipe(bundle(), plain());
  const kvrelay::Engine engine(bundle(), serving());
  for (int repeat = 0; repeat < repeats(); ++repeat)
    for (bool batched : {false, true}) {
      const Watchdog watchdog("cancel");
      kvrelay::Request request =
          batched ? engine.submit({50, 60, 70}, length(200)) : pipe.stream({50, 60, 70}, length(200));
      REQUIRE(request.next());
      std::thread([&] { request.cancel(); }).join();
      const kvrelay::Result result = request.result();
      CHECK(result.finish_reason == "cancelled");
      CHECK(result.token_ids.size() < 200);
      CHECK(static_cast<std::int64_t>(result.token_ids.size()) == result.stats.emitted);
    }
}

TEST_CASE("a pipeline's request may be read by one thread after another") {
  const kvrelay::Pipeline pipe(bundle(), plain());
  kvrelay::Request request = pipe.stream(case_prompt(2), case_options(2));
  std::string text;
  while (std::optional<std::string> piece = request.next()) {
    text += *piece;
    std::thread([&] { text += request.next().value_or(""); }).join();
  }
  CHECK(request.done());
  const kvrelay::Result result = request.result();
  CHECK(equals(result, references()[2]));
  CHECK(text == result.text);
}
