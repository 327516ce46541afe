import sys
from benchmarks.trained_memory import *
if __name__=="__main__":
    for s,w in (("no_shard",1),("no_shard",2),("full",2),("zero2",2),("hybrid",4),("hybrid_zero2",4),("zero2_master",2)):
        for r in measure_world(MemoryRequest(s,model="nano",tokens=16),world_size=w):
            print(s,w,r["num_trained"], r["measured"],{k:v-r["predicted"][k] for k,v in r["measured"].items()},r["peak_rss_gib"],flush=True)
