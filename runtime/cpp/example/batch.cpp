// Prompts from standard input, one a line, answered by one engine for several threads; every answer is deterministic.
//   batch BUNDLE [THREADS] < prompts.txt

#include <kvrelay.hpp>

#include <atomic>
#include <cstdio>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

int batch(const std::string& bundle, std::size_t thread_count) {
  std::vector<std::string> prompts;
  for (std::string line; std::getline(std::cin, line);)
    if (!line.empty()) prompts.push_back(line);

  const kvrelay::Engine engine(bundle);
  kvrelay::Options options;
  options.max_new_tokens = 64;
  options.deterministic = true;

  std::atomic<std::size_t> next{0};
  std::atomic<int> failed{0};
  std::mutex output;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < thread_count; ++t)
    threads.emplace_back([&] {
      for (std::size_t i; (i = next++) < prompts.size();) {
        try {
          const kvrelay::Result result = engine.submit({{"user", prompts[i]}}, options).result();
          const std::lock_guard<std::mutex> lock(output);
          std::cout << i << ' ' << result.receipt->digest.substr(0, 12) << ' ' << result.text << '\n';
        } catch (const kvrelay::Error& error) {
          ++failed;
          const std::lock_guard<std::mutex> lock(output);
          std::cerr << i << ' ' << error.what() << '\n';
        }
      }
    });
  for (std::thread& thread : threads) thread.join();

  const kvrelay::EngineStats stats = engine.stats();
  std::fprintf(stderr, "[%lld answers, %.1f tokens/s, %.1f rows a pass]\n", static_cast<long long>(stats.finished),
               stats.tokens_per_second.value_or(0), stats.batch_fill.value_or(0));
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "usage: batch BUNDLE [THREADS] < prompts.txt\n";
    return 2;
  }
  try {
    return batch(arguments[1], count > 2 ? std::stoul(arguments[2]) : 4);
  } catch (const std::exception& error) {
    std::cerr << "batch: " << error.what() << '\n';
    return 2;
  }
}
