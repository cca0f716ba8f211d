"""What is compiled: devices, iterations, chunks of them, rollouts, learners, gradients. No thread, queue or process."""
