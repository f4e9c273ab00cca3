// How reports write numbers.
#pragma once

#include <cstdio>
#include <string>

namespace purlin {

// "1, 2, 3"
template <class Numbers>
std::string listed(const Numbers& numbers, const char* between = ", ") {
  std::string text;
  for (auto n : numbers) text += (text.empty() ? "" : between) + std::to_string(n);
  return text;
}

// "2.53 s"
inline std::string in_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 100 ? "%.2f s" : "%.0f s", seconds);
  return text;
}

}  // namespace purlin
