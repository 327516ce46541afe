import sys
from benchmarks.trained_memory import *
if __name__=="__main__":
    for s,w in (("no_shard",1),("no_shard",2),("full",2),("zero2",2),("hybrid",4),("hybrid_zero2",4),("zero2_master",2)):
        for r in measure_world(MemoryRequest(s,model="nano",tokens=16),world_size=w):
            p=r["predicted"]; a=r["allocated"]
            print(s,w,{k:v for k,v in p.items() if v}, r["num_trained"], r["bookkeeping"], r["peak"])
            print("   ", a, "backward", a["backward"]-(p["total"]-p["shard_gradient"]), "ready", a["ready"]-(p["total"]-(p["gradients"] if p["master"] else 0)), "between", a["between"]-r["between_steps"], "gath", a["gathered"]-r["between_steps"]-p["gathered"], flush=True)
