/* One set of the page cache: loads, stores, prefetches, write-backs and a flush of a few lines.
 *
 * Lanes are folded into one: a process stands for a warp. A frame is one element. Any victim that
 * may be taken can be chosen, so that the policy does not matter. Commands complete after any time
 * and, FAILURES times, with an error; queue_pair.pml shows that they do complete. Every access to
 * shared memory is a step of its own, and steps interleave in one global order; what weaker orders
 * add is not looked at here. A wait is a guard that opens when another try could have an effect. A
 * comment that is nothing but a name says which function of the code the next step is taken from.
 *
 * Each of these breaks the protocol and must be found: NO_RECHECK, NO_GENERATION,
 * CLEAN_AT_END, NO_SET_LOCK, PUBLISH_EARLY, and IGNORE=PIN_MASK, =DIRTY or =WRITING for victims.
 */
#ifndef WAYS
#define WAYS 1
#endif
#ifndef LINES
#define LINES 2
#endif
#ifndef STORES
#define STORES 2                           /* of the one storer, to line 0 */
#endif
#ifndef READERS
#define READERS 2                          /* the first of line 0, the next of line 1 ... */
#endif
#ifndef FAILURES
#define FAILURES 0
#endif

/* Tag words: state, writing, dirty, pins, generation, line. */
#define LINE_MASK 3
#define GENERATION_MASK 28
#define PIN 32
#define PIN_MASK 96
#define DIRTY 128
#define WRITING 256
#define STATE_MASK 1536
#define INVALID 0
#define BUSY 512
#define VALID 1024
#define LINE(w) ((w) & LINE_MASK)
#define GENERATION(w) ((w) & GENERATION_MASK)
#define STATE(w) ((w) & STATE_MASK)
#define IDENTITY(w) ((w) & (STATE_MASK | GENERATION_MASK | LINE_MASK))  /* identity_of */
#define HOLDS(w, line) (((w) & (STATE_MASK | LINE_MASK)) == (VALID | (line))) /* holds */
#define FILLED(w) (VALID | ((w) & (GENERATION_MASK | LINE_MASK)))       /* filled */
#ifndef IGNORE
#define IGNORE 0
#endif
#define OBSTACLES ((PIN_MASK | DIRTY | WRITING) & ~(IGNORE))
#define REPLACEABLE(w) \
  (STATE(w) == INVALID || ((w) & (STATE_MASK | OBSTACLES)) == VALID)    /* is_replaceable */
#define CLEANABLE(w) \
  (((w) & (STATE_MASK | PIN_MASK | DIRTY | WRITING)) == (VALID | DIRTY)) /* is_cleanable */
#define DIRTY_AT_REST(w) (((w) & (STATE_MASK | WRITING | DIRTY)) == (VALID | DIRTY))
#ifdef NO_GENERATION
#define NEXT_GENERATION(w) GENERATION(w)
#else
#define NEXT_GENERATION(w) (((w) + 4) & GENERATION_MASK)
#endif

short tags[WAYS];
byte frame[WAYS];                          /* line * 16 + version; 255 at first */
byte storage[LINES];                       /* the version that it holds */
bit set_lock;
byte buffer[WAYS];                         /* of detached write-backs */
bit fills[WAYS], writes[WAYS];             /* detached commands */
byte failures = FAILURES;

/* What no code knows: for the properties. */
byte started, finished;                    /* versions of line 0; the others stay at 0 */
byte users[WAYS];                          /* storers in the frame */

#define IN(line, w) (STATE(tags[w]) != INVALID && LINE(tags[w]) == (line))
#define OTHER(w) (WAYS - 1 - (w))
#define MOVABLE(w) (REPLACEABLE(tags[w]) || CLEANABLE(tags[w]))
/* Whether claiming a frame for `line` would do anything but come back. */
#define CAN_CLAIM(line) (!set_lock && (HOLDS(tags[0], line) || HOLDS(tags[WAYS - 1], line) || \
  (!IN(line, 0) && !IN(line, WAYS - 1) && (MOVABLE(0) || MOVABLE(WAYS - 1)))))

inline begin_write(w) {                    /* begin_write */
#ifdef CLEAN_AT_END
  tags[w] = tags[w] | WRITING
#else
  tags[w] = (tags[w] & ~DIRTY) | WRITING
#endif
}

inline end_write(w) {                      /* end_write */
#ifdef CLEAN_AT_END
  tags[w] = tags[w] & ~WRITING & (failed -> ~0 : ~DIRTY)
#else
  tags[w] = (tags[w] & ~WRITING) | (failed -> DIRTY : 0)
#endif
}

/* The rest of a write-back whose data the controller has. */
inline complete_write(w, data) {
  if
  :: storage[LINE(tags[w])] = data % 16
  :: atomic { failures > 0 -> failures--; failed = true }
  fi;
  end_write(w)
}

inline take(w, line) {
  assert(users[w] == 0 && STATE(tags[w]) != BUSY && !IN(line, OTHER(w)));
  word = BUSY | NEXT_GENERATION(tags[w]) | line;                        /* busy */
  tags[w] = word;
  way = w;
  claimed = true
}

/* Asks for a frame for `line`: then `claimed`, and tags[way] is `word`. Or a victim gets cleaned. */
inline claim_frame(line) {                 /* claim_frame */
  atomic {
    CAN_CLAIM(line);
    way = 0;
#ifndef NO_SET_LOCK
    set_lock = 1
#endif
  }
  do
  :: way < WAYS && !IN(line, way) -> way++
  :: way == WAYS || IN(line, way) -> break
  od;
  if
  :: way < WAYS -> set_lock = 0            /* kHit, or a fill that we wait for */
  :: way == WAYS && !MOVABLE(0) && !MOVABLE(WAYS - 1) -> set_lock = 0
  :: atomic { way == WAYS && REPLACEABLE(tags[0]) -> take(0, line) }    /* claim_victim */
#if WAYS > 1
  :: atomic { way == WAYS && REPLACEABLE(tags[1]) -> take(1, line) }
  :: atomic { way == WAYS && CLEANABLE(tags[1]) -> way = 1; begin_write(1); cleans = true }
#endif
  :: atomic { way == WAYS && CLEANABLE(tags[0]) -> way = 0; begin_write(0); cleans = true }
  fi;
  if
  :: cleans ->                             /* kDirty */
     atomic { set_lock = 0; cleans = false }
     value = frame[way];                   /* stage_writes */
     complete_write(way, value);           /* write_back */
     atomic { failed = false; value = 0; way = 0 }
#if WAYS > 1
  :: atomic { claimed && CLEANABLE(tags[OTHER(way)]) -> begin_write(OTHER(way)) } /* clean_ahead */
     set_lock = 0;
     buffer[OTHER(way)] = frame[OTHER(way)];                            /* stage_writes */
     writes[OTHER(way)] = 1                                             /* move_lines_detached */
#endif
  :: claimed -> set_lock = 0
  :: !claimed && !cleans
  fi
}

/* One access to `line`, which ends in `served`: a load into `value`, or a store of `version`. */
inline access(line, stores) {              /* access */
  do
  :: served -> break
  :: !served ->
     do                                    /* probe */
     :: way < WAYS && !HOLDS(tags[way], line) -> way++
     :: atomic { way < WAYS && HOLDS(tags[way], line) -> word = tags[way]; break }
     :: way == WAYS -> break
     od;
     if
     :: way < WAYS && stores ->            /* serve_hits */
        if
        :: atomic {                        /* try_pin */
             IDENTITY(tags[way]) == IDENTITY(word) -> tags[way] = tags[way] + PIN; users[way]++
           }
           frame[way] = line * 16 + version;
           atomic { tags[way] = (tags[way] - PIN) | DIRTY; users[way]--; served = true } /* unpin */
        :: IDENTITY(tags[way]) != IDENTITY(word)
        fi
     :: way < WAYS && !stores ->           /* serve_hits */
        value = frame[way];
#ifdef NO_RECHECK
        served = true
#else
        served = (IDENTITY(tags[way]) == IDENTITY(word))                /* still_holds */
#endif
     :: way == WAYS ->                     /* serve_misses */
        claim_frame(line);
        if
        :: claimed ->
#ifdef PUBLISH_EARLY
           tags[way] = FILLED(word);
#endif
           value = line * 16 + storage[line];
           frame[way] = value;             /* land_reads */
           if
           :: stores -> frame[way] = line * 16 + version
           :: !stores -> value = frame[way]
           fi;
           atomic {
#ifndef PUBLISH_EARLY
             tags[way] = FILLED(word) | (stores -> DIRTY : 0);   /* publish_fill, filled */
#endif
             served = true
           }
        :: claimed && failures > 0 ->
           atomic { failures--; tags[way] = GENERATION(word) }          /* abandon_fill, emptied */
        :: !claimed
        fi;
        claimed = false
     fi;
     atomic {
       way = 0;
       word = 0;
       if
       :: stores || !served -> value = 0
       :: else
       fi
     }
  od;
  served = false
}

/* Starts the write-back of every dirty line, and waits until none is in flight. */
inline flush_ways() {                      /* flush_ways */
  way = 0;
  do
  :: way == WAYS -> break
  :: atomic { way < WAYS && DIRTY_AT_REST(tags[way]) -> begin_write(way) }
     value = frame[way];                   /* stage_writes */
     complete_write(way, value);           /* write_back */
     atomic { way = (failed -> way : way + 1); failed = false; value = 0 }
  :: way < WAYS && !DIRTY_AT_REST(tags[way]) && !(tags[way] & WRITING) -> way++
  od;
  way = 0
}

#define LOCALS byte way, value, version, oldest; short word; bit served, claimed, cleans, failed

proctype storer() {
  LOCALS;
  do
  :: finished == STORES -> break
  :: finished < STORES ->
     atomic { version++; started = version }
     access(0, true);
     finished = version
  od
}

proctype reader(byte line) {
  LOCALS;
  oldest = (line == 0 -> finished : 0);
  access(line, false);
  assert(value / 16 == line && value % 16 >= oldest);
  assert(value % 16 <= (line == 0 -> started : 0))
}

proctype prefetcher(byte line) {
  LOCALS;
  claim_frame(line);                       /* prefetch */
  if
  :: claimed -> fills[way] = 1             /* move_lines_detached */
  :: !claimed
  fi
}

proctype flusher() {
  LOCALS;
  oldest = finished;
  flush_ways();
  assert(storage[0] >= oldest);
  if
  :: atomic { STATE(tags[0]) == VALID && REPLACEABLE(tags[0]) ->        /* invalidate_ways */
       tags[0] = GENERATION(tags[0]) }                                  /* emptied */
  :: true
  fi
}

inline finish_write(w) {
  atomic { writes[w] = 0; value = buffer[w] }
  complete_write(w, value);                /* finish */
  atomic { failed = false; value = 0 }
}

inline finish_fill(w) {
  atomic { fills[w] = 0; value = storage[LINE(tags[w])] }
  frame[w] = LINE(tags[w]) * 16 + value;   /* finish */
  tags[w] = FILLED(tags[w]);        /* filled */
  value = 0
}

/* Whoever drains finishes what nobody waits for. */
proctype drainer() {
  LOCALS;
end:
  do
  :: writes[0] -> finish_write(0)
  :: fills[0] -> finish_fill(0)
#if WAYS > 1
  :: writes[1] -> finish_write(1)
  :: fills[1] -> finish_fill(1)
#endif
  od
}

init {
  LOCALS;
  atomic {
    do
    :: way < WAYS -> frame[way] = 255; way++
    :: way == WAYS -> break
    od;
    way = 0;
    run drainer();
    run storer();
    run flusher();
    do
    :: value < READERS -> run reader(value % LINES); value++
    :: value == READERS -> break
    od;
#if WAYS > 1
    run prefetcher(LINES - 1)
#endif
  }
  (_nr_pr == 2);
  (STATE(tags[0]) != BUSY && STATE(tags[WAYS - 1]) != BUSY);
  flush_ways();
  assert(storage[0] == STORES && storage[1] == 0);
  assert(((tags[0] | tags[WAYS - 1]) & (PIN_MASK | DIRTY | WRITING)) == 0)
}
