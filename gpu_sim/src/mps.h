/* The runtime as a client of the simulated MPS (bin/nvidia-cuda-mps-control). */
#ifndef MPS_H
#define MPS_H

#include "sim.h"

/* Join the MPS whose control socket is in $CUDA_MPS_PIPE_DIRECTORY, else in /tmp/nvidia-mps; where none answers, or
 * this process may not talk to it, go on without. Sets `sim_process_limit` of the GPUs. */
void mps_join(void);
/* Percent of the multiprocessors that this process gets; 100 without MPS. */
unsigned mps_percentage(void);
/* Whether the server that was joined is gone: nothing works any more then. */
bool mps_lost(void);

#endif
