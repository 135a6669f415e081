// Memory over many short generations.

#include <doctest/doctest.h>

#include <unistd.h>

#include "helpers.hpp"

using namespace helpers;

namespace {

/// Resident memory of this process in KiB.
long resident() {
  std::ifstream file("/proc/self/statm");
  long size = 0, pages = 0;
  file >> size >> pages;
  return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

}  // namespace

TEST_CASE("memory is flat over many short generations, on lasting and on new threads") {
  const kvrelay::Pipeline pipe(bundle(), drafting());
  const kvrelay::Engine engine(bundle(), serving());
  const int total = std::stoi(variable("KVRELAY_TEST_GENERATIONS"));
  const auto generate = [&](int i) {
    const auto number = static_cast<std::size_t>(i) % references().size();
    kvrelay::Options options = case_options(static_cast<int>(number));
    options.deterministic = true;
    if (i % 4 == 0) {
      CHECK(equals(engine.submit(case_prompt(static_cast<int>(number)), options).result(), references()[number]));
    } else if (i % 4 == 1) {
      kvrelay::Request dropped = engine.submit(case_prompt(1), length(20));
      dropped.next();
    } else if (i % 4 == 2) {
      try {
        pipe.generate(case_prompt(2), length(20), [](std::string_view) { throw 1; });
      } catch (int) {
      }
      CHECK_THROWS_AS(pipe.generate(std::vector<std::int64_t>{-1}), kvrelay::Error);
    } else {
      options.deterministic = false;
      std::thread([&] {
        CHECK(equals(pipe.generate(case_prompt(static_cast<int>(number)), options), references()[number]));
      }).join();
    }
  };
  const int warm = total / 5;
  for (int i = 0; i < warm; ++i) generate(i);
  const long before = resident();
  for (int i = warm; i < total; ++i) generate(i);
  const long after = resident();
  std::printf("%d generations: %ld KiB after the first %d, %+ld KiB at the end\n", total, before, warm, after - before);
  CHECK(after - before < 2048);
}
