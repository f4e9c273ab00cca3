// The forms in which data and flag travel in one access: packets, and lines of fifteen words.
//
// A thread sends and receives units of one or two words. Unit u of an operand lies in place
// place(u) of the operand's part of a row; a thread that sends a unit is the one that consumes it.
#pragma once

#include <cstdint>

#include "atom/pair.h"
#include "snac/call.h"

namespace purlin {

template <class Word, int words>
struct Unit {
  Word word[words];
};

template <class Atom>
struct Packets {
  using Word = typename Atom::Word;
  using Packet = typename Atom::Packet;
  using Parcel = Packet;
  using Unit = purlin::Unit<Word, 1>;

  PURLIN_HD static int units(int words) { return words; }
  PURLIN_HD static bool goes_on(int unit, int units) { return unit < units; }
  PURLIN_HD static int places(int words) { return words; }
  PURLIN_HD static int place(int unit) { return unit; }

  template <class View>
  PURLIN_RANK static Unit load(const View& box, int unit, int) {
    return {box.template load<Atom>(unit)};
  }
  template <class View>
  PURLIN_RANK static void store(const View& box, int unit, int, const Unit& what) {
    box.store(unit, what.word[0]);
  }

  PURLIN_RANK static Packet* row(const Call<Packet>& call, int owner, int source, uint64_t epoch) {
    return call.window[owner].packets(epoch, source, call.world, call.capacity);
  }
  PURLIN_RANK static int row_length(const Call<Packet>& call) { return call.capacity.packets; }
  PURLIN_RANK static Parcel get(const Packet* at, bool) { return Atom::get_packet(at); }
  PURLIN_RANK static bool all(bool found) { return found; }
  PURLIN_RANK static uint64_t flag_of(const Parcel& parcel) { return Atom::flag_of(parcel); }
  PURLIN_RANK static Unit payload(const Parcel& parcel) { return {Atom::payload(parcel)}; }
};

// Eight neighbouring threads carry a line: seven of them two words each, the last one a word and
// the flag. A warp goes through its lines together.
template <class Atom>
struct Lines {
  using Word = typename Atom::Word;
  using Packet = typename Atom::Packet;
  using Unit = purlin::Unit<Word, 2>;
  struct Parcel {
    Pair piece;
    uint64_t flag;
  };

  PURLIN_HD static int places(int words) { return (words + kWords - 1) / kWords; }
  PURLIN_HD static int units(int words) { return places(words) * kThreads; }
  // For a whole warp as long as any of it has a unit.
  PURLIN_HD static bool goes_on(int unit, int units) { return unit / kWarp * kWarp < units; }
  PURLIN_HD static int place(int unit) { return unit / kThreads; }

  template <class View>
  PURLIN_RANK static Unit load(const View& box, int unit, int words) {
    const int i = first_word(unit);
    Unit what = {0, 0};
    if (i < words) what.word[0] = box.template load<Atom>(i);
    if (!is_last(unit) && i + 1 < words) what.word[1] = box.template load<Atom>(i + 1);
    return what;
  }
  template <class View>
  PURLIN_RANK static void store(const View& box, int unit, int words, const Unit& what) {
    const int i = first_word(unit);
    if (i < words) box.store(i, what.word[0]);
    if (!is_last(unit) && i + 1 < words) box.store(i + 1, what.word[1]);
  }

  PURLIN_RANK static Line* row(const Call<Packet>& call, int owner, int source, uint64_t epoch) {
    return call.window[owner].lines(epoch, source, call.world, call.capacity);
  }
  PURLIN_RANK static int row_length(const Call<Packet>& call) { return call.capacity.lines; }
  PURLIN_RANK static void put(Line* at, const Unit& what, uint64_t flag, bool takes_part) {
    Atom::put_line(at, {what.word[0], what.word[1]}, flag, takes_part);
  }
  PURLIN_RANK static Parcel get(const Line* at, bool takes_part) {
    Parcel parcel;
    parcel.piece = Atom::get_line(at, &parcel.flag, takes_part);
    return parcel;
  }
  PURLIN_RANK static bool all(bool found) { return Atom::all_of_warp(found); }
  PURLIN_RANK static uint64_t flag_of(const Parcel& parcel) { return parcel.flag; }
  PURLIN_RANK static Unit payload(const Parcel& parcel) {
    return {parcel.piece.low, parcel.piece.high};
  }

 private:
  static constexpr int kWarp = 32;
  static constexpr int kThreads = Atom::kLineThreads;
  static constexpr int kWords = Atom::kLineWords;

  PURLIN_HD static int first_word(int unit) {
    return unit / kThreads * kWords + unit % kThreads * 2;
  }
  PURLIN_HD static bool is_last(int unit) { return unit % kThreads == kThreads - 1; }
};

}  // namespace purlin
