// Generates and prints ids, scores and statistics, for comparison with Python's.
//   probe BUNDLE PRECISION DRAFT TOKENS TEMPERATURE RUNS < prompt

#include <kvrelay.hpp>

#include <cstdio>
#include <iostream>
#include <iterator>

namespace {

void print(const char* name, std::int64_t value) { std::printf("%s %lld\n", name, static_cast<long long>(value)); }
void print(const char* name, double value) { std::printf("%s %a\n", name, value); }
void print(const char* name, const std::string& value) { std::printf("%s %s\n", name, value.c_str()); }
void print(const char* name, const std::optional<double>& value) {
  value ? print(name, *value) : print(name, std::string("None"));
}

}  // namespace

int main(int, char** arguments) {
  const std::string prompt(std::istreambuf_iterator<char>(std::cin), {});
  kvrelay::PipelineOptions opening;
  opening.precision = arguments[2];
  opening.draft = arguments[3];
  opening.threads = 2;
  const kvrelay::Pipeline pipe(arguments[1], opening);
  kvrelay::Options options;
  options.max_new_tokens = std::stoi(arguments[4]);
  options.temperature = std::stod(arguments[5]);
  options.seed = 7;
  for (int run = 0; run < std::stoi(arguments[6]); ++run) {
    int pieces = 0;
    const kvrelay::Result result = pipe.generate({{"user", prompt}}, options, [&](std::string_view) { ++pieces; });
    std::printf("run %d\ntext %s\n", run, result.text.c_str());
    for (std::size_t i = 0; i < result.token_ids.size(); ++i)
      std::printf("token %lld %a\n", static_cast<long long>(result.token_ids[i]), result.scores[i]);
    kvrelay::Stats::visit(result.stats, [](const char* name, const auto& value) { print(name, value); });
    const double total = result.stats.ttft + result.stats.decode_seconds;
    std::printf("facade_us_per_token %f\nfacade_percent %f\npieces %d\n",
                1e6 * result.facade_seconds / static_cast<double>(result.token_ids.size()),
                100 * result.facade_seconds / total, pieces);
  }
}
