/* One queue pair: submitters, the publisher, drainers, a controller, and commands nobody waits for.
 *
 * Lanes are folded into one: a process stands for a warp. Every access to shared memory is a step
 * of its own, and steps interleave in one global order; what weaker orders add is not looked at
 * here. A wait is a guard that opens when another try could have an effect, so that a lost wake-up
 * is a deadlock. Counters start just below their wrap. A comment that is nothing but a name says
 * which function of the code the next step is taken from.
 *
 * Each of these breaks the protocol and must be found: NO_SECOND_LOOK, NO_SPACE_CHECK,
 * NO_PUBLISH_AFTER_DRAIN, NO_HELP, NO_TURN, NO_PHASE, NO_DRAIN_LOCK, EARLY_RELEASE.
 */
#ifndef SUBMITTERS
#define SUBMITTERS 3
#endif
#ifndef COMMANDS
#define COMMANDS 2                         /* of each submitter */
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#define TOTAL (SUBMITTERS * COMMANDS)
#define WRAP 8                             /* tickets wrap here; no more than this are ever out */
#define TURNS (WRAP / DEPTH)
#define START (WRAP - 2)

#define ENTRY(t) ((t) % DEPTH)
#define TURN(t) (((t) % WRAP) / DEPTH)
#define MINUS(a, b) (((a) + WRAP - (b)) % WRAP)

/* Slot words: turn * 4 + phase of the slot's life. */
#define FREE 0
#define WRITTEN 1
#define DONE 2
#define WORD(turn, phase) ((turn) * 4 + (phase))
#define FIRST_TURN(e) TURN((START + MINUS(e, ENTRY(START)) % DEPTH) % WRAP)

byte ticket = START, tail = START, head = START, fetched = START;
byte slots[DEPTH], sq[DEPTH], cq_cid[DEPTH], cq_sqhd[DEPTH], result[DEPTH];
bit cq_phase[DEPTH], detached[DEPTH];
byte publish_lock, drain_lock;             /* who holds it, or 0 */
byte sq_doorbell = ENTRY(START), cq_doorbell = ENTRY(START);

/* What no code knows: for the properties. */
byte sq_head = START, cq_tail = START;     /* the controller's, free-running like our own */
byte completed, finished;

#define NEXT_PHASE(position) (1 - TURN(position) % 2)
#define CQE_READY(position) (cq_phase[ENTRY(position)] == NEXT_PHASE(position))
#define HOLDS_NO_LOCK (publish_lock != _pid + 1 && drain_lock != _pid + 1)

/* Finds the space of the ring, and how far entries are written in it. */
inline count_publishable() {               /* count_publishable */
  d_step {
    space = MINUS(DEPTH - 1 + fetched, from);
#ifdef NO_SPACE_CHECK
    space = DEPTH;
#endif
    count = 0;
  }
  do                                       /* is_written */
  :: count < space && slots[ENTRY(from + count)] == WORD(TURN(from + count), WRITTEN) -> count++
  :: else -> break
  od
}

inline publish() {                         /* publish */
  do
  :: d_step { publish_lock == 0 -> publish_lock = _pid + 1; from = tail; }  /* try_lock */
     count_publishable();
     if
     :: count > 0 ->
        d_step {                           /* publish */
          tail = (from + count) % WRAP;
          sq_doorbell = ENTRY(tail);
          assert(MINUS(tail, sq_head) <= DEPTH - 1);
        }
     :: else
     fi;
     atomic { from = (from + count) % WRAP; publish_lock = 0; }         /* unlock */
#ifdef NO_SECOND_LOOK
     break;
#endif
     count_publishable();
     if
     :: count == 0 -> break
     :: else
     fi
  :: publish_lock != 0 -> break
  od;
  atomic { from = 0; count = 0; space = 0; }
}

inline release_slot(e) {                   /* release_slot */
  slots[e] = WORD((slots[e] / 4 + 1) % TURNS, FREE)
}

/* Drains one completion. Entered when there is one and the lock is free; somebody may be faster. */
inline drain() {                           /* drain */
  if
#ifdef NO_DRAIN_LOCK
  :: from = head;
#else
  :: d_step {                              /* try_lock */
       drain_lock == 0 && head != tail -> drain_lock = _pid + 1; from = head;
     }
#endif
     if
#ifndef NO_PHASE
     :: !CQE_READY(from)
     :: CQE_READY(from) ->
#else
     :: true ->
#endif
        d_step {                           /* load16_relaxed_system, done */
          cid = cq_cid[ENTRY(from)];
          assert(slots[cid] % 4 == WRITTEN);
          slots[cid] = slots[cid] - WRITTEN + DONE;
          alone = detached[cid];           /* is_detached */
          got = 1;
          completed++;
        }
        d_step {
          fetched = (fetched + MINUS(cq_sqhd[ENTRY(from)], ENTRY(fetched)) % DEPTH) % WRAP;
          head = (from + 1) % WRAP;
          cq_doorbell = ENTRY(head);
        }
     fi;
     drain_lock = 0                        /* unlock */
#ifndef NO_DRAIN_LOCK
  :: drain_lock != 0 || head == tail
#endif
  fi;
  if
  :: got ->
     if
     :: alone ->
        finished++;                        /* finish_detached */
        release_slot(cid)
     :: else
     fi;
     atomic { got = 0; alone = 0; cid = 0; }
#ifndef NO_PUBLISH_AFTER_DRAIN
     if
     :: ticket != tail -> publish()         /* has_unpublished */
     :: else
     fi
#endif
  :: else
  fi;
  from = 0
}

#define LOCALS byte from, count, space, cid; bit got, alone
#define NOBODY_WAITS (command == 0 && me < 3)   /* detached commands */
#define CAN_HELP (drain_lock == 0 && CQE_READY(head))

proctype submitter(byte me) {
  byte t, command;
  LOCALS;
  do
  :: command == COMMANDS -> break
  :: else ->
     d_step { t = ticket; ticket = (ticket + 1) % WRAP; }               /* take_tickets */
     do                                    /* wait_for_slots */
#ifdef NO_TURN
     :: slots[ENTRY(t)] % 4 == FREE -> break
#else
     :: slots[ENTRY(t)] == WORD(TURN(t), FREE) -> break                 /* slot_is_free */
#endif
#ifndef NO_HELP
     :: slots[ENTRY(t)] != WORD(TURN(t), FREE) && CAN_HELP -> assert(HOLDS_NO_LOCK); drain()
#endif
     od;
     atomic {                              /* write_entry */
       assert(slots[ENTRY(t)] % 4 == FREE);
       sq[ENTRY(t)] = me;
       result[ENTRY(t)] = 0;
     }
     d_step {
       slots[ENTRY(t)] = WORD(TURN(t), WRITTEN);
       detached[ENTRY(t)] = NOBODY_WAITS;                  /* a bit of the word */
     }
     publish();
     if
     :: NOBODY_WAITS
     :: else ->
        do                                 /* wait_for_completions */
        :: slots[ENTRY(t)] == WORD(TURN(t), DONE) -> break
        :: slots[ENTRY(t)] != WORD(TURN(t), DONE) && CAN_HELP -> assert(HOLDS_NO_LOCK); drain()
        od;
#ifdef EARLY_RELEASE
        release_slot(ENTRY(t));
#endif
        atomic { assert(result[ENTRY(t)] == me); finished++; }          /* land_reads */
#ifndef EARLY_RELEASE
        release_slot(ENTRY(t))
#endif
     fi;
     command++
  od
}

/* Fetches in order, completes in any order, and never posts more than the CQ has room for. */
proctype controller() {
  byte e, in_flight;
  bit running[DEPTH];
end:
  do
  :: sq_doorbell != ENTRY(sq_head) &&      /* fetch, fetchable */
     in_flight + (cq_tail % DEPTH + DEPTH - cq_doorbell) % DEPTH < DEPTH - 1 ->
     d_step {
       e = ENTRY(sq_head);
       assert(slots[e] == WORD(TURN(sq_head), WRITTEN));
       sq_head = (sq_head + 1) % WRAP;
       running[e] = 1;
       in_flight++;
       e = 0;
     }
  :: atomic {
       if
       :: running[0] -> e = 0
       :: running[1] -> e = 1
#if DEPTH > 2
       :: running[2] -> e = 2
       :: running[3] -> e = 3
#endif
       fi;
       result[e] = sq[e]                   /* execute */
     }
     d_step {                              /* post */
       cq_cid[ENTRY(cq_tail)] = e;
       cq_sqhd[ENTRY(cq_tail)] = ENTRY(sq_head);
       cq_phase[ENTRY(cq_tail)] = NEXT_PHASE(cq_tail);
       cq_tail = (cq_tail + 1) % WRAP;
       running[e] = 0;
       in_flight--;
       e = 0;
     }
  od
}

init {
  byte e;
  LOCALS;
  d_step {
    do
    :: e < DEPTH ->
       slots[e] = WORD(FIRST_TURN(e), FREE);
       cq_phase[e] = 1 - NEXT_PHASE((START + MINUS(e, ENTRY(START)) % DEPTH) % WRAP);
       e++
    :: else -> break
    od
  }
  atomic {
    run controller();
    e = 1;
    do
    :: e <= SUBMITTERS -> run submitter(e); e++
    :: else -> break
    od
  }
  (_nr_pr == 2);
  do                                       /* fw_quiesce */
  :: head == ticket -> break
  :: head != ticket && CAN_HELP -> drain()
  od;
  assert(completed == TOTAL && finished == TOTAL && publish_lock + drain_lock == 0);
}
