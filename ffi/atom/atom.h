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
//   Word load(const Word*)
//       A load that starts where it stands in the program, so that it runs beside what follows.
//
//   kReduces<Item, Op>
//       Whether the Atom has this reduction.
//
//   void copy(Block&, char* dst, const char* src, const Plan&, Range)
//       The whole block copies the bytes [begin, end) of the box, counted in iteration order.
//       `dst` and `src` are the boxes' first bytes. Every byte count and alignment works.
//   void reduce<T, Acc, Op>(Block&, char* dst, const char* const* src, int world, const Plan&,
//   Range)
//       The same range of `world` boxes, folded in ascending order starting from src[0] in the
//       accumulator type and rounded once. `dst` may be one of the sources, if at the same place.
//
// copy and reduce end without a barrier: SNAC places those. What a block reads was ordered before
// by Block::await; what it writes is ordered by Block::sync and then Block::signal.
#pragma once

#include "layout/plan.h"
