"Action chunks learned from demonstrations and from one's own games, both on the disk; a kill costs at most one game"
import os
import sys
from pathlib import Path
import gymnasium as gym
import torch
from torch import nn
from fastrl_replay.all import Episodes, MixedMemory, ReplayMemory, SimpleStep

folder, n_games, k = Path(sys.argv[1]), int(sys.argv[2]), 4          # k actions at once
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2*k))
demos, online = (ReplayMemory(20_000, path=folder/name, seed=0) for name in ('demos', 'online'))
both, episodes = MixedMemory([online, demos], seed=0), Episodes(fn=lambda game: dict(total_reward=game.total_reward*0 + len(game)/500))
optimizer = torch.optim.Adam(model.parameters(), 2e-3)

def expert(state): return [int(state[2] + .3*state[3] + .05*state[0] + .1*state[1] > 0)]
def learned(state): return model(torch.as_tensor(state)).view(k, 2).argmax(1).tolist()

def play(policy, memory, game):
    "Play a game, some actions at once, and store it with how long it was"
    env, actions, n, ended = gym.make('CartPole-v1'), [], 0, False
    state, _ = env.reset(seed=game)
    while not ended:
        actions = actions or list(policy(state))
        action = actions.pop(0)
        after, reward, terminated, truncated, _ = env.step(action)
        memory.extend(episodes.push(SimpleStep(state, action, after, terminated, truncated, reward, step_n=n, episode_n=game)))
        state, n, ended = after, n + 1, terminated or truncated
    return n

def update():
    batch = both.sample(64, windows={'action': range(k)})
    losses = nn.functional.cross_entropy(model(batch.state).view(-1, k, 2).flatten(0, 1), batch.action.flatten(), reduction='none').view(-1, k)
    loss = (losses*~batch.is_pad['action']*batch.total_reward[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

for game in range(len(demos)//500, 8): play(expert, demos, game)
if (folder/'model.pt').exists(): model.load_state_dict(torch.load(folder/'model.pt'))
if not len(online): play(expert, online, 100)
first = int(online.recent(1).episode_n[0]) + 1
for game in range(first, first + n_games):
    for _ in range(60): update()
    length = play(learned, online, game)
    torch.save(model.state_dict(), folder/'new.pt')
    os.replace(folder/'new.pt', folder/'model.pt')
    print(game, length, online.n_added, demos.n_added, flush=True)
