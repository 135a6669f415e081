// One way to start, or to end, a process each.
//   paths WAY BUNDLE [ENVIRONMENT]

#include <kvrelay.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

std::string bundle;
std::string environment;

kvrelay::PipelineOptions plain() {
  kvrelay::PipelineOptions options;
  options.draft = "none";
  options.threads = 2;
  return options;
}

kvrelay::EngineOptions serving() {
  kvrelay::EngineOptions options;
  options.max_batch = 4;
  options.threads = 2;
  return options;
}

kvrelay::Options length(int tokens) {
  kvrelay::Options options;
  options.max_new_tokens = tokens;
  options.ignore_eos = true;
  return options;
}

// Destroyed after exit handlers have run, as a host's globals are.
std::optional<kvrelay::Pipeline> global_pipeline;
std::optional<kvrelay::Engine> global_engine;
std::optional<kvrelay::Request> global_request;
std::atomic<int> running{0}, stopped{0};

/// Starts threads that generate for ever, in every way that there is, and waits until each has done it once.
/// Where `stoppable`, an Error of shutdown() ends them; else nothing may come out of a call, or the process would abort.
void generate_for_ever(bool stoppable = false) {
  global_pipeline.emplace(bundle, plain());
  global_engine.emplace(bundle, serving());
  global_request.emplace(global_engine->submit({50, 60, 70}, length(250)));
  const auto start = [stoppable](std::function<void()> generate) {
    const auto loop = [generate = std::move(generate)] {
      for (;;) {
        generate();
        ++running;
      }
    };
    if (!stoppable) return std::thread(loop).detach();
    std::thread([loop] {
      try {
        loop();
      } catch (const kvrelay::Error& error) {
        if (error.kind() == kvrelay::ErrorKind::shutdown) ++stopped;
      }
    }).detach();
  };
  start([] { global_pipeline->generate({50, 60, 70}, length(100), [](std::string_view) {}); });
  start([] {
    for (const std::string& piece : global_pipeline->stream({50, 60, 70}, length(100))) (void)piece.size();
  });
  start([] { global_engine->submit({50, 60, 70}, length(100)).result(); });
  start([] { global_engine->submit({50, 60, 70}, length(100)).stream([](std::string_view) {}); });
  // New objects can be made after shutdown() too: these threads would never stop.
  if (!stoppable) start([] { kvrelay::Engine(bundle, serving()); });
  if (!stoppable) start([] { kvrelay::Pipeline(bundle, plain()); });
  while (running < 12) std::this_thread::yield();
}

int answers() {
  const kvrelay::Pipeline pipe(bundle, plain());
  return pipe.generate("hello", length(10)).token_ids.size() == 10 ? 0 : 1;
}

volatile std::sig_atomic_t interrupted = 0;

/// Whether SIGINT has the handler `wanted` after everything of the library was used.
int keeps_handler(void (*wanted)(int)) {
  std::signal(SIGINT, wanted);
  if (answers() != 0) return 1;
  kvrelay::Engine(bundle, serving()).submit("hello", length(5)).result();
  struct sigaction found{};
  sigaction(SIGINT, nullptr, &found);
  return found.sa_handler == wanted ? 0 : 1;
}

const std::map<std::string, std::function<int()>> ways = {
    {"return",
     [] {
       const kvrelay::Pipeline pipe(bundle, plain());
       pipe.generate("hello", length(10));
       return 0;
     }},
    {"return with globals",
     [] {
       global_pipeline.emplace(bundle, plain());
       global_engine.emplace(bundle, serving());
       global_request.emplace(global_engine->submit({50, 60, 70}, length(250)));
       return 3;
     }},
    {"return after shutdown",
     [] {
       generate_for_ever(true);
       std::thread([] { kvrelay::shutdown(); }).join();
       while (stopped < 4) std::this_thread::yield();
       return 0;
     }},
    {"return while detached threads generate",
     [] {
       generate_for_ever();
       return 5;
     }},
    {"exit while detached threads generate",
     []() -> int {
       generate_for_ever();
       std::exit(6);
     }},
    {"exit on another thread while main generates",
     [] {
       generate_for_ever();
       std::thread([] { std::exit(7); }).detach();
       for (;;) global_pipeline->generate({50, 60, 70}, length(100));
       return 1;
     }},
    {"exit in a callback",
     [] {
       generate_for_ever();
       global_pipeline->generate({50, 60, 70}, length(100), [](std::string_view) { std::exit(8); });
       return 1;
     }},
    {"exit while progress is told",
     [] {
       kvrelay::PipelineOptions options = plain();
       options.progress = [](std::string_view) { std::exit(9); };
       kvrelay::Pipeline(bundle, options);
       return 1;
     }},
    {"exit while a callback sleeps",
     [] {
       global_pipeline.emplace(bundle, plain());
       std::thread([] {
         global_pipeline->generate({50, 60, 70}, length(100), [](std::string_view) {
           ++running;
           for (;;) pause();
         });
       }).detach();
       while (running < 1) std::this_thread::yield();
       return 10;
     }},
    {"exit while a callback throws",
     [] {
       global_pipeline.emplace(bundle, plain());
       std::thread([] {
         for (;;) {
           try {
             global_pipeline->generate({50, 60, 70}, length(100), [](std::string_view) {
               ++running;
               throw 1;
             });
           } catch (int) {
           }
         }
       }).detach();
       while (running < 3) std::this_thread::yield();
       return 11;
     }},
    {"exception out of main",
     []() -> int {
       generate_for_ever();
       throw std::runtime_error("out of main");
     }},
    {"quick_exit",
     []() -> int {
       generate_for_ever();
       std::quick_exit(12);
     }},
    {"interrupt handled by the host",
     [] {
       std::signal(SIGINT, [](int) { interrupted = 1; });
       const kvrelay::Pipeline pipe(bundle, plain());
       const kvrelay::Result result =
           pipe.generate("hello", length(240), [&](std::string_view, kvrelay::Request& request) {
             if (running++ == 3) std::raise(SIGINT);
             if (interrupted) request.cancel();
           });
       if (result.finish_reason != "cancelled" || result.text.empty()) return 1;
       return 130;
     }},
    {"interrupt not handled",
     [] {
       generate_for_ever();
       kill(getpid(), SIGINT);
       for (;;) pause();
       return 1;
     }},
    {"keeps SIGINT as it was", [] { return keeps_handler(SIG_DFL); }},
    {"keeps SIGINT ignored", [] { return keeps_handler(SIG_IGN); }},
    {"keeps the host's SIGINT", [] { return keeps_handler([](int) { interrupted = 1; }); }},
    {"a forked child exits",
     [] {
       generate_for_ever();
       const pid_t child = fork();
       if (child == 0) std::exit(0);
       int status = 0;
       waitpid(child, &status, 0);
       return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 13 : 1;
     }},
    {"a forked child uses and destroys",
     [] {
       generate_for_ever();
       for (int i = 0; i < 10; ++i) {
         const pid_t child = fork();
         if (child == 0) {
           alarm(20);  // a hang
           int refused = 0;
           const auto refuse = [&](const std::function<void()>& use) {
             try {
               use();
             } catch (const kvrelay::Error& error) {
               refused += error.kind() == kvrelay::ErrorKind::interpreter;
             }
           };
           refuse([] { global_pipeline->generate("hello", length(1)); });
           refuse([] { (void)global_engine->submit("hello", length(1)); });
           refuse([] { kvrelay::Pipeline(bundle, plain()); });
           refuse([] { kvrelay::start(environment); });
           global_request.reset();
           global_engine.reset();
           global_pipeline.reset();
           kvrelay::shutdown();
           std::exit(refused);
         }
         int status = 0;
         waitpid(child, &status, 0);
         if (!WIFEXITED(status) || WEXITSTATUS(status) != 4) return 1;
       }
       return 14;
     }},
    {"starts on a thread that ends",
     [] {
       int failures = 0;
       std::thread([&] { failures += answers(); }).join();
       std::thread([&] { failures += answers(); }).join();
       return failures + answers();
     }},
    {"starts on many threads at once",
     [] {
       std::atomic<int> failures{0};
       std::vector<std::thread> threads;
       for (int i = 0; i < 8; ++i) threads.emplace_back([&] { failures += answers(); });
       for (std::thread& thread : threads) thread.join();
       return static_cast<int>(failures);
     }},
    {"starts anywhere", answers},
    {"starts in an environment",
     [] {
       kvrelay::start(environment);
       return answers();
     }},
    {"keeps the locale",
     [] {
       const std::string before = std::setlocale(LC_ALL, nullptr);
       const int failed = answers();
       return failed + (before == std::setlocale(LC_ALL, nullptr) ? 0 : 1);
     }},
};

}  // namespace

int main(int count, char** arguments) {
  const auto way = ways.find(count > 2 ? arguments[1] : "");
  if (way == ways.end()) {
    std::fprintf(stderr, "unknown way\n");
    return 99;
  }
  bundle = arguments[2];
  environment = count > 3 ? arguments[3] : "";
  if (way->first == "exception out of main") return way->second();
  try {
    return way->second();
  } catch (const kvrelay::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 98;
  }
}
