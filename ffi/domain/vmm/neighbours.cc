// The processes of one host that share the memory of their GPUs: who has which, and where it is
// seen here.
#include "domain/vmm/neighbours.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <stdexcept>

namespace purlin::vmm {
namespace {

using link::Descriptor;
using link::Message;

enum class Kind : int64_t {
  kHere,      // joined; of process 0: all have
  kDevice,    // id, bytes of the arena and of its allocation, with a descriptor
  kShared,    // whether the sender lends; all its devices came before
  kLooked,    // pairs of GPUs of which the sender's sees nothing of the other
  kReserve,   // partition, bytes
  kReserved,  // partition, offset
  kLend,      // base and bytes of an allocation, with a descriptor
  kBorrowed,  // base, address at the sender, error
  kSite,      // tag, text
  kReport     // text
};

Message begin(Kind kind) { return std::move(Message().put(static_cast<int64_t>(kind))); }

std::string plural(const std::set<int>& processes) {
  std::string text;
  for (int p : processes) text += (text.empty() ? "process " : ", ") + std::to_string(p);
  return text;
}

}  // namespace

Neighbours::Neighbours(const Joining& joining, Events events)
    : joining_(joining), events_(std::move(events)), link_(joining.process, joining.count, *this) {
  for (const auto& [_, ordinal] : joining.devices) ordinals_.push_back(ordinal);
  for (int p = 0; p < joining.count; ++p) everybody_.insert(p);
  here_.insert(joining.process);
  link_.join(joining.name, joining.token, joining.seconds);
}

// Waits for what some processes do; ends with a sentence when one of them is gone, or too late.
template <class Done>
void Neighbours::await(Lock& lock, const std::string& what, const std::set<int>& whom, Done done) {
  std::set<int> gone;
  const auto over = [&] {
    for (int p : whom)
      if (link_.has_ended(p)) gone.insert(p);
    return done() || !gone.empty();
  };
  const bool late = !changed_.wait_for(lock, std::chrono::duration<double>(joining_.seconds), over);
  if (done()) return;
  throw std::runtime_error(what + ": " +
                           (late ? "took longer than PURLIN_JOIN_S" : plural(gone) + " has ended"));
}

void Neighbours::meet(const Own& own) {
  Lock lock(mutex_);
  members_.insert(members_.end(), own.members.begin(), own.members.end());
  blind_.insert(own.blind.begin(), own.blind.end());
  used_ = own.used;
  await(lock, "joining all processes of the host", everybody_, [&] { return here_ == everybody_; });
  lock.unlock();
  if (link_.process() == 0) link_.send_others(begin(Kind::kHere));
  for (const Member& member : own.members) {
    const Range range = range_of(member.arena);
    const Descriptor descriptor = exported(range.base);
    Message device = begin(Kind::kDevice);
    link_.send_others(device.put(member.id).put(member.arena_bytes).put(range.bytes),
                      descriptor.get());
  }
  link_.send_others(begin(Kind::kShared).put(int64_t{joining_.lends}).put(int64_t{own.blocks}));
  lock.lock();
  lends_ = lends_ && joining_.lends;
  blocks_ = std::min(blocks_, own.blocks);
  shared_.insert(link_.process());
  await(lock, "sharing the memory of GPUs", everybody_, [&] { return shared_ == everybody_; });
  Message looked = begin(Kind::kLooked);
  looked.put(static_cast<int64_t>(blind_.size()));
  for (const auto& [one, other] : blind_) looked.put(one).put(other);
  looked_.insert(link_.process());
  lock.unlock();
  link_.send_others(looked);
  lock.lock();
  await(lock, "looking at the memory of all GPUs", everybody_,
        [&] { return looked_ == everybody_; });
}

bool Neighbours::can_peer(const std::vector<int64_t>& ids) const {
  std::lock_guard lock(mutex_);
  for (int64_t one : ids)
    for (int64_t other : ids)
      if (blind_.count({one, other}) != 0) return false;
  return true;
}

int64_t Neighbours::place_locked(const std::string& partition, int64_t bytes) {
  const auto found = offsets_.find(partition);
  if (found != offsets_.end()) return found->second;
  int64_t least = members_.front().arena_bytes;
  for (const Member& member : members_) least = std::min(least, member.arena_bytes);
  const int64_t offset = bytes <= least - used_ ? used_ : -1;
  if (offset >= 0) used_ += bytes;
  return offsets_[partition] = offset;
}

int64_t Neighbours::reserve(const std::string& partition, int64_t bytes) {
  Lock lock(mutex_);
  if (link_.process() == 0) return place_locked(partition, bytes);
  if (offsets_.count(partition) == 0) {
    link_.send(0, begin(Kind::kReserve).put(partition).put(bytes));
    await(lock, "asking process 0 for windows", {0},
          [&] { return offsets_.count(partition) != 0; });
  }
  return offsets_[partition];
}

std::vector<int64_t> Neighbours::lend(const void* at, const std::set<int>& processes) {
  const auto address = reinterpret_cast<int64_t>(at);
  const auto find = [&]() -> Loan* {
    const auto next = loans_.upper_bound(address);
    if (next == loans_.begin()) return nullptr;
    auto& [base, loan] = *std::prev(next);
    return address < base + loan.bytes ? &loan : nullptr;
  };
  const auto sees = [&](const Loan& loan) {
    return std::includes(loan.answered.begin(), loan.answered.end(), processes.begin(),
                         processes.end());
  };
  {
    Lock lock(mutex_);
    if (const Loan* loan = find(); loan != nullptr && sees(*loan)) return loan->shift;
  }
  std::lock_guard one(lending_);
  const Range range = range_of(at);
  const Descriptor descriptor = exported(range.base);
  const auto base = reinterpret_cast<int64_t>(range.base);
  Lock lock(mutex_);
  Loan& loan = loans_[base];
  loan.bytes = range.bytes;
  loan.shift.resize(link_.count());
  loan.answered.insert(link_.process());
  loan.error.clear();
  std::set<int> asked;
  for (int process : processes)
    if (loan.answered.count(process) == 0) asked.insert(process);
  lock.unlock();
  for (int process : asked)
    link_.send(process, begin(Kind::kLend).put(base).put(range.bytes), descriptor.get());
  lock.lock();
  await(lock, "lending an array", asked, [&] { return sees(loan) || !loan.error.empty(); });
  if (!loan.error.empty()) throw std::runtime_error(loan.error);
  return loan.shift;
}

void Neighbours::name_site(uint64_t tag, const std::string& text) {
  link_.send_others(begin(Kind::kSite).put(static_cast<int64_t>(tag)).put(text));
}

void Neighbours::report(int process, const std::string& text) {
  link_.send(process, begin(Kind::kReport).put(text));
}

std::string Neighbours::about(int process, uint64_t tag, const std::string& text) const {
  std::lock_guard lock(mutex_);
  const auto found = sites_.find(process);
  const std::string who = "Process " + std::to_string(process);
  if (found == sites_.end()) return who + " has run no call yet. ";
  if (found->second.count(tag) != 0) return "";
  const std::string place = text.substr(0, text.find(" ("));
  for (const auto& [_, other] : found->second)
    if (other.substr(0, other.find(" (")) == place) return who + " has run " + other + " instead. ";
  return who + " has not run this call. ";
}

void Neighbours::joined(int process) {
  {
    Lock lock(mutex_);
    here_.insert(process);
  }
  changed_.notify_all();
}

void Neighbours::take_device(int from, Message& message, const Descriptor& descriptor) {
  Member member;
  member.id = message.number();
  member.process = from;
  member.arena_bytes = message.number();
  Mapped found{nullptr, ordinals_};
  try {
    found = mapped(descriptor, message.number(), ordinals_);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "purlin: GPU %ld of process %d: %s\n", member.id, from, error.what());
  }
  member.arena = found.base;
  Lock lock(mutex_);
  members_.push_back(member);
  for (const auto& [id, ordinal] : joining_.devices)
    if (std::count(found.blind.begin(), found.blind.end(), ordinal) != 0)
      blind_.insert({id, member.id});
}

// Another process wants its arrays to be seen here.
void Neighbours::take_loan(int from, Message& message, const Descriptor& descriptor) {
  const int64_t base = message.number(), bytes = message.number();
  int64_t at = 0;
  std::string error;
  try {
    const Mapped found = mapped(descriptor, bytes, ordinals_);
    if (!found.blind.empty()) throw std::runtime_error("a GPU has no access to it");
    at = reinterpret_cast<int64_t>(found.base);
  } catch (const std::exception& failure) {
    error = "process " + std::to_string(link_.process()) + " cannot see an array of process " +
            std::to_string(from) + ": " + failure.what();
  }
  link_.send(from, begin(Kind::kBorrowed).put(base).put(at).put(error));
}

void Neighbours::take_answer(int from, Message& message) {
  const int64_t base = message.number(), at = message.number();
  const std::string error = message.text();
  Lock lock(mutex_);
  const auto found = loans_.find(base);
  if (found == loans_.end()) return;
  if (!error.empty()) {  // which the answer of another must not undo
    found->second.error = error;
    return;
  }
  found->second.shift[from] = at - base;
  found->second.answered.insert(from);
}

void Neighbours::receive(int from, Message& message, Descriptor descriptor) {
  switch (static_cast<Kind>(message.number())) {
    case Kind::kDevice: return take_device(from, message, descriptor);
    case Kind::kLend: return take_loan(from, message, descriptor);
    case Kind::kBorrowed: take_answer(from, message); break;
    case Kind::kSite: {
      const auto tag = static_cast<uint64_t>(message.number());
      const std::string text = message.text();
      Lock lock(mutex_);
      sites_[from][tag] = text;
      lock.unlock();
      return events_.named(tag, text);
    }
    case Kind::kReport: return events_.reported(message.text());
    case Kind::kReserve: {
      const std::string partition = message.text();
      const int64_t bytes = message.number();
      Lock lock(mutex_);
      const int64_t offset = place_locked(partition, bytes);
      lock.unlock();
      link_.send(from, begin(Kind::kReserved).put(partition).put(offset));
      return;
    }
    case Kind::kHere: {
      Lock lock(mutex_);
      here_ = everybody_;
      break;
    }
    case Kind::kShared: {
      Lock lock(mutex_);
      lends_ = message.number() != 0 && lends_;
      blocks_ = std::min(blocks_, static_cast<int>(message.number()));
      shared_.insert(from);
      break;
    }
    case Kind::kLooked: {
      Lock lock(mutex_);
      for (int64_t n = message.number(); n > 0; --n) {
        const int64_t one = message.number();
        blind_.insert({one, message.number()});
      }
      looked_.insert(from);
      break;
    }
    case Kind::kReserved: {
      const std::string partition = message.text();
      Lock lock(mutex_);
      offsets_[partition] = message.number();
      break;
    }
  }
  changed_.notify_all();
}

void Neighbours::ended(int process) {
  {
    Lock lock(mutex_);
  }  // who has just looked is asleep by now
  changed_.notify_all();
  events_.ended(process);
}

}  // namespace purlin::vmm
