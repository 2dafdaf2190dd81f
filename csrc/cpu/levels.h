// The instruction set levels that the kernels were compiled for, and which of them this machine has.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

struct Level {
  const char* name;
  const KernelTable* table;
  bool (*available)();
  bool emulated;  // for tests: slower than the next level, never the default
};

// Names of the levels this machine has, best first.
std::vector<std::string> available_levels();
// Names of the levels that emulate instructions the machine may lack.
std::vector<std::string> emulated_levels();
// One of either; std::invalid_argument when the machine does not have it.
const Level& find_level(const std::string& name);
// "ready", or why the processor's matrix tiles cannot be used; empty when it has none.
std::string amx_state();
