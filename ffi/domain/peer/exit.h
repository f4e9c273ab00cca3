// Keeps threads of ours from CUDA while the process takes it down.
#pragma once

#include <chrono>
#include <cstdlib>
#include <mutex>

namespace purlin::peer {

class Exit {
 public:
  // Calls use(), unless the process is ending. Its end waits for that, but not for ever.
  template <class Use>
  static void unless_ending(Use use) {
    std::lock_guard lock(mutex());
    if (!ending()) use();
  }

  // To be called once CUDA has started, whose own handlers must come after ours.
  static void expect() {
    static const int registered = std::atexit([] {
      const std::unique_lock lock(mutex(), std::chrono::seconds(2));
      if (lock.owns_lock()) ending() = true;
    });
    static_cast<void>(registered);
  }

 private:
  static std::timed_mutex& mutex() {
    static auto* one = new std::timed_mutex;  // threads may outlive static objects
    return *one;
  }
  static bool& ending() {
    static bool found = false;
    return found;
  }
};

}  // namespace purlin::peer
