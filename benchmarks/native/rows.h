// How the programs that time collectives alone are told what to time, and how they say what they
// found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "graphs.h"

namespace purlin::bench {

// What a row says besides its figures.
struct Label {
  std::string impl, variant, regime, atom;
  int blocks = 0, threads = 0, depth = 0;
};

struct Options {
  bool rows = false;   // JSON instead of text
  bool about = false;  // say what is here, and time nothing
  int samples = 21;
  int64_t most = 1 << 30;         // bytes that buffers hold
  std::vector<std::string> rest;  // what is none of these

  Options(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word == "--rows")
        rows = true;
      else if (word == "--about")
        about = true;
      else if (word == "--samples" && i + 1 < argc)
        samples = std::max(1, std::atoi(argv[++i]));
      else if (word == "--most" && i + 1 < argc)
        most = std::atoll(argv[++i]);
      else
        rest.push_back(word);
    }
  }
};

// What to time: the words of the command line, whose last field may come several times, or lines of
// the standard input. A caller that keeps the program waiting there has other programs take turns.
class Jobs {
 public:
  Jobs(std::vector<std::string> words, size_t fields, std::string usage)
      : words_(std::move(words)), fields_(fields), usage_(std::move(usage)), at_(fields - 1) {
    if (!words_.empty() && words_.size() < fields_) stop(usage_, 2);
  }

  // The fields of the next one; none at the end.
  std::vector<std::string> next() {
    std::vector<std::string> found;
    if (!words_.empty()) {
      if (at_ == words_.size()) return found;
      found.assign(words_.begin(), words_.begin() + fields_ - 1);
      found.push_back(words_[at_++]);
      return found;
    }
    for (std::string line, word; found.empty() && std::getline(std::cin, line);)
      for (std::istringstream in(line); in >> word;) found.push_back(word);
    if (!found.empty() && found.size() != fields_) stop(usage_, 2);
    return found;
  }

 private:
  const std::vector<std::string> words_;
  const size_t fields_;
  const std::string usage_;
  size_t at_;
};

inline int row_of(const std::string& op) {
  const int row = find_collective(op);
  if (row < 0) stop("there is no collective " + op, 2);
  return row;
}

// Prints one row; `figures` of JSON come after what it says of the call.
inline void print_row(const Cell& cell, const Label& label, const std::string& figures) {
  std::printf(R"({"op": "%s", "bytes": %lld, "dtype": "float32", "devices": %d, "impl": "%s", )"
              R"("variant": "%s", "regime": "%s", "atom": "%s", "blocks": %d, "threads": %d, )"
              R"("depth": %d, %s})"
              "\n",
              std::string(cell.collective().name).c_str(), static_cast<long long>(cell.bytes()),
              cell.world, label.impl.c_str(), label.variant.c_str(), label.regime.c_str(),
              label.atom.c_str(), label.blocks, label.threads, label.depth, figures.c_str());
  std::fflush(stdout);
}

inline void print(const Cell& cell, const Label& label, std::vector<double> us, bool rows) {
  std::sort(us.begin(), us.end());
  auto at = [&](double part) { return us[static_cast<size_t>(part * (us.size() - 1) + 0.5)]; };
  const double gbs = cell.bytes() / at(0.5) / 1e3;
  char text[200];
  if (rows) {
    std::snprintf(text, sizeof text,
                  R"("us_median": %.3f, "us_p10": %.3f, "us_p90": %.3f, "algbw_gbs": %.3f)",
                  at(0.5), at(0.1), at(0.9), gbs);
    return print_row(cell, label, text);
  }
  std::snprintf(text, sizeof text, "%12lld bytes %9.2f us (%.2f to %.2f) %8.1f GB/s",
                static_cast<long long>(cell.bytes()), at(0.5), us.front(), us.back(), gbs);
  const std::string how =
      label.impl == "nccl"
          ? "nccl " + label.variant
          : label.regime + " " + label.atom + " " + std::to_string(label.depth) + " " +
                std::to_string(label.blocks) + " x " + std::to_string(label.threads);
  std::printf("%-14s %-44s %s\n", std::string(cell.collective().name).c_str(), how.c_str(), text);
  std::fflush(stdout);
}

}  // namespace purlin::bench
