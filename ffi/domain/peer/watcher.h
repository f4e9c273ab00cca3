// Prints what kernels report about waits that do not end, before Python sees an error.
#pragma once

#include <string>

#include "snac/watch.h"

namespace purlin::peer {

class Domain;

// Starts the thread that looks at every device's report. Once for each domain.
void start_watcher(const Domain& domain);

// Names the call site that carries `tag`, for reports.
void name_site(uint64_t tag, const std::string& text);

// Prints a report, which then is the last one.
void publish(const std::string& text);

// The last report as text, or empty.
std::string last_report();

}  // namespace purlin::peer
