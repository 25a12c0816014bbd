"""On standby: loaded with the server, idle until ``kvwitness attach`` asks for the hooks, idle again after detach.

Off means off here, too. Until the scheduler is constructed one function is wrapped, its constructor, and the
wrapper puts the original back before it calls it. From then on SGLang's own functions stand; what is left is
one thread that sleeps in ``accept`` on a socket which only the server's user can reach.

What arrives on the socket leaves a request: for one step, ``Scheduler.get_next_batch_to_run`` is wrapped by a
single assignment. The scheduler's own thread comes by there between two steps, where no function that the
hooks wrap is running, and does the patching itself. File work (opening the journal, closing it) is done on the
listener's thread before and after.
"""
