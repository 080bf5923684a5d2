"""What type checkers must refuse, every line that is marked: test_types.py."""

import numpy as np
import skim

comm: skim.Communicator = skim.in_process_group(1)[0]
skim.Reducer(comm, density="high")  # refused
skim.Reducer(comm, value_cod="q4")  # refused
skim.Codec(value_code=4)  # refused
skim.Reducer(comm, density=np.zeros(3))  # refused
skim.Reducer(comm, selector=lambda accumulated: accumulated)  # refused
skim.Reducer(comm, local=skim.Selector())  # refused
skim.top_k(np.zeros(3, np.float32))  # refused
skim.Exchange(comm, "gtopk").run(np.zeros(3), np.zeros(3, np.float32), 3)  # refused
skim.predict("dense", ranks=2, n=1, k=1, link=1.0)  # refused
