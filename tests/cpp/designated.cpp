// Options by name, which C++20 allows, without a warning about the others.

#include <kvrelay/options.hpp>

kvrelay::Options short_answer() { return {.max_new_tokens = 3}; }
kvrelay::Options cool() { return {.temperature = 0.5, .seed = 7, .stop = {"x"}}; }
kvrelay::PipelineOptions drafting() { return {.draft = "ngram"}; }
kvrelay::EngineOptions serving() { return {.max_batch = 4, .faults = kvrelay::Faults{.rollback = 0.5}}; }
