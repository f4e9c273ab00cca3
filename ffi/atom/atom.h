// The contract of an Atom: how bytes move on one kind of hardware, for one block.
//
// An Atom is a class with static members; SNAC is a template over it and knows no hardware.
//
//   using Word                  payload of one packet: an unsigned integer of 4 or 8 bytes
//   using Packet                payload and flag, written and read in one access
//   uint64_t flag(epoch, tag)
//       The flag of a packet. Flags of different epochs differ, and none equals zeroed memory.
//   Packet make_packet(Word, epoch, tag), uint64_t flag_of(Packet), Word payload(Packet)
//   void put_packet(Packet* at, Packet)
//       One access that other ranks see whole or not at all; orders nothing else.
//   Packet get_packet(const Packet* at)
//       The matching access on the reading side; orders nothing else.
//
//   kLines                      whether it has lines; then also
//   void put_line(Line* at, Pair, uint64_t flag, bool takes_part)
//   Pair get_line(const Line* at, uint64_t* flag, bool takes_part)
//       What each of kLineThreads neighbouring threads does with its piece of a line. Other ranks
//       see the line whole or not at all; `flag` is the line's, and in the place of its last word.
//       All threads of a warp call it together, also those that take no part.
//   bool all_of_warp(bool)      whether it is true for all of them
//
//   Word load(const Word*)
//       A load that starts where it stands in the program, so that it runs beside what follows.
//
//   void copy(Block&, const Moves&, const Plan&, Range)
//       The whole block copies the bytes [begin, end) of each move's box, counted in iteration
//       order, some of each in turn: far and near memory are then busy at once. Every byte count
//       and alignment works.
//   void reduce<T, Acc, Op>(Block&, char* dst, const char* const* src, int world, const Plan&,
//   Range)
//       The same range of `world` boxes, folded in ascending order starting from src[0] in the
//       accumulator type and rounded once. `dst` may be one of the sources, if at the same place.
//
// On GPUs also, for kernels that a block runs with shared memory of its own:
//   kName, kLeast               its name in policies, and the least compute capability (90: 9.0)
//   int scratch_bytes(depth)    dynamic shared memory for `depth` stages
//   void prepare(Block&)        once in a kernel, before anything else
//
// copy and reduce end without a barrier: SNAC places those. What a block reads was ordered before
// by Block::await; what it writes is ordered by Block::sync and then Block::signal.
#pragma once

#include "atom/moves.h"
#include "layout/plan.h"

namespace purlin {

inline constexpr int kMaxThreads = 512;  // of a block on a GPU

}  // namespace purlin
