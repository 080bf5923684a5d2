/* The library for C, and for languages that call C: JAX by ctypes, Rust, Julia. A C11 header.
 *
 *   skim_in_process_group(4, 60.0, group);            // or skim_communicator_over, ..._connect_mpi
 *   skim_reducer_new(group[rank], "density=0.01 exchange=gtopk", &reducer);
 *   skim_reducer_set_layout(reducer, parameters, count);
 *   each step:
 *     skim_reducer_reduce(reducer, 0, gradient, n, SKIM_F32, NULL);  // now the group's mean
 *     skim_reducer_end_step(reducer, epoch, &apply);
 *
 * All ranks make the same calls in the same order. skim/reducer.hpp has the contracts of a step;
 * this header says only what differs.
 *
 * Errors. A function that can fail returns a skim_status, and skim_last_error() has one line about
 * it. No exception leaves a function. A function that failed has set none of its results. NULL
 * where a contract does not allow it is SKIM_INVALID_ARGUMENT.
 *
 * Threads. One thread at a time may use a reducer and its communicator. Ranks of one process may
 * use theirs at the same time.
 */
#ifndef SKIM_C_API_H
#define SKIM_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rises with every change after which a program must be compiled anew. New functions and options
 * do not change it. */
#define SKIM_ABI_VERSION 1

/* SKIM_ABI_VERSION of the library that runs. Compare it after dlopen(). */
uint32_t skim_abi_version(void);
/* The version of the library, such as "0.1.0". Static storage. */
const char* skim_version(void);

typedef enum skim_status {
  SKIM_OK = 0,
  SKIM_INVALID_ARGUMENT = 1, /* a mistake of the caller; nothing has changed */
  SKIM_COMM_ERROR = 2,       /* a peer or a link failed; the group was told and is of no more use */
  SKIM_NON_FINITE = 3,       /* a gradient held NaN or infinity; the step was taken back */
  SKIM_STATE_ERROR = 4,      /* a saved state is damaged or does not fit; nothing has changed */
  SKIM_OTHER_ERROR = 5       /* anything else, such as no memory; treat it as SKIM_COMM_ERROR */
} skim_status;

/* One line about the last function of this thread that failed. Valid until the next one fails in
 * this thread. "" if none has failed. */
const char* skim_last_error(void);

/* ---- groups of ranks ------------------------------------------------------------------------ */

/* One rank of a group. */
typedef struct skim_communicator skim_communicator;

/* Makes a whole group in this process. group[r] becomes rank r's; use each from a thread of its
 * own. timeout_s: the longest time of one wait, in seconds, in (0, 1e9), rounded up to whole
 * milliseconds. */
skim_status skim_in_process_group(int size, double timeout_s, skim_communicator** group);

/* Joins MPI_COMM_WORLD: skim::connect(Backend::mpi). Collective. SKIM_INVALID_ARGUMENT if the
 * library was built without MPI. */
skim_status skim_connect_mpi(double timeout_s, skim_communicator** communicator);

/* A transport of the caller's own: a stream of bytes from each rank to each other rank, such as TCP
 * sockets. Bytes arrive in the order in which they were sent.
 *
 * Both functions wait until all `bytes` have been moved, and then return 0. Another number says
 * that the stream is broken, or that a time of their own has run out. Skim then ends the step on
 * all ranks with SKIM_COMM_ERROR, and the number is in the message. They must return at some time.
 *
 * receive is called by the thread that uses the communicator or its reducer, after
 * skim_reducer_start also by a thread of the reducer's. send is called by one thread of Skim's for
 * each peer. So both may run at the same time, and send for two peers. */
typedef struct skim_transport {
  void* context; /* is passed on to the functions; must outlive the communicator */
  int (*send)(void* context, int to, const void* data, size_t bytes);
  int (*receive)(void* context, int from, void* data, size_t bytes);
  int rank, size; /* 0 <= rank < size */
  int host;       /* any number, equal for ranks of one machine: exchange=hierarchical reads it */
} skim_transport;

/* Makes this rank's communicator over a transport. *transport is copied. Does not communicate. */
skim_status skim_communicator_over(const skim_transport* transport,
                                   skim_communicator** communicator);

/* -1 for NULL. */
int skim_communicator_rank(const skim_communicator* communicator);
int skim_communicator_size(const skim_communicator* communicator);

/* Call it if this rank cannot go on. The other ranks' waits then end with SKIM_COMM_ERROR, which
 * names the rank `culprit`. Does not block. NULL is allowed. */
void skim_communicator_abort(skim_communicator* communicator, int culprit);

/* Frees it. If a reducer still uses it, it is freed with the last such reducer. Over a transport,
 * that waits until send has returned for all messages. NULL is allowed. */
void skim_communicator_free(skim_communicator* communicator);

/* ---- reducers ------------------------------------------------------------------------------- */

/* Replaces this rank's gradients with the group's mean gradients, and keeps residuals. */
typedef struct skim_reducer skim_reducer;

/* options: words NAME=VALUE between spaces; "" or NULL: all as by default. Names, values, ranges
 * and defaults are those of skim.Reducer in Python, except link and local_speeds, which have no
 * text. true and false stand for a flag, and commas divide a list. Further options:
 *   density       the fraction k/n of entries that each rank sends, in (0, 1] [0.001]
 *   down_density  the density of the result, for exchanges that cut it, in (0, 1] [as density]
 * SKIM_INVALID_ARGUMENT: an unknown option or one that is given twice, a value out of its range. */
skim_status skim_reducer_new(skim_communicator* communicator, const char* options,
                             skim_reducer** reducer);
/* NULL is allowed. */
void skim_reducer_free(skim_reducer* reducer);

/* One parameter of the model. */
typedef struct skim_parameter {
  uint32_t slot;    /* the bucket of which it is a part */
  const char* name; /* its residual is saved and loaded by this name */
  size_t length;    /* in entries */
} skim_parameter;

/* Declares all buckets. The parameters of a bucket lie one after another, in the order given.
 * Between steps only. All ranks must give the same layout. If it is called again, residuals move
 * with the names of their parameters. */
skim_status skim_reducer_set_layout(skim_reducer* reducer, const skim_parameter* parameters,
                                    size_t count);

/* Functions take it as an int, so that a wrong number is an error like any other. */
typedef enum skim_dtype { SKIM_F32 = 0, SKIM_F16 = 1, SKIM_BF16 = 2 } skim_dtype;

/* What one bucket moved in one step. Bytes, entries and times are this rank's. */
typedef struct skim_report {
  uint64_t n, k;                       /* entries of the bucket; entries to select */
  uint64_t sent_entries, sum_entries;  /* selected; in the sum over the ranks */
  uint64_t sent_bytes, received_bytes; /* as passed to the transport */
  uint64_t rounds;
  int64_t select_ns, exchange_ns, apply_ns;
  int32_t dense;  /* 1: the bucket was summed whole */
  int32_t finite; /* 0: the gradient of a rank, or the sum, holds NaN or infinity */
} skim_report;

/* Replaces the gradient of a bucket with the group's mean. Collective.
 *   gradient [n]  in host memory; in: this rank's; out: the mean of the entries sent, zeros
 *                 elsewhere, the same bits on all ranks
 *   report        NULL is allowed
 * After another error than SKIM_INVALID_ARGUMENT, restart every rank from its last state. */
skim_status skim_reducer_reduce(skim_reducer* reducer, uint32_t slot, void* gradient, size_t n,
                                int dtype, skim_report* report);

/* Begins the same on a thread of the reducer's, so that it overlaps with the backward pass. The
 * gradient belongs to the reducer until skim_reducer_wait. Wait for each ticket once, in any
 * order. */
skim_status skim_reducer_start(skim_reducer* reducer, uint32_t slot, void* gradient, size_t n,
                               int dtype, uint64_t* ticket);
skim_status skim_reducer_wait(skim_reducer* reducer, uint64_t ticket, skim_report* report);

/* Ends a step. Call it once per optimizer step on every rank, when no ticket is open.
 *   epoch  of the next step
 *   apply  1: apply the step; 0: leave it out, because a gradient held NaN or infinity. NULL is
 *          allowed
 * SKIM_NON_FINITE on every rank, with non_finite=raise. SKIM_INVALID_ARGUMENT, with nothing
 * changed: a ticket is open, or a bucket of the step has failed (skim_reducer_rollback_step ends
 * such a step). */
skim_status skim_reducer_end_step(skim_reducer* reducer, double epoch, int* apply);
/* Call it instead, on every rank or on none, to leave the step out: the entries that it sent go
 * back into the residuals. */
skim_status skim_reducer_rollback_step(skim_reducer* reducer, double epoch);

/* Copies this rank's residual of a slot, and the mass that it holds as a server, to residual [n].
 * Zeros if none is kept (feedback=false). Between steps only. */
skim_status skim_reducer_residual(skim_reducer* reducer, uint32_t slot, float* residual, size_t n);

/* A saved state. */
typedef struct skim_state {
  void* data;
  size_t bytes;
} skim_state;

/* Saves this rank's residuals and step. Between steps only. *state is the library's memory; free it
 * with skim_state_free. */
skim_status skim_reducer_save(const skim_reducer* reducer, skim_state* state);
/* Sets *state to NULL and 0. NULL is allowed, and so is a state that is empty. */
void skim_state_free(skim_state* state);
/* Loads what all `ranks` ranks of the saved run have saved, in rank order, after set_layout and
 * between steps. The number of ranks may have changed: Reducer::load. The states may be in memory
 * of the caller's own, and are only read.
 *   strict       1: the model must have the parameters of the state, or it is SKIM_STATE_ERROR.
 *                0, on all ranks: parameters that both have get their residuals back. Those that
 *                only the model has begin at 0, and what only the state has is lost
 *   differences  one line that names the parameters of which only the model or only the state has
 *                some; "" if there are none. Valid until the next load of this thread. NULL is
 *                allowed */
skim_status skim_reducer_load(skim_reducer* reducer, const skim_state* states, size_t ranks,
                              int strict, const char** differences);

#ifdef __cplusplus
}
#endif

#endif /* SKIM_C_API_H */
