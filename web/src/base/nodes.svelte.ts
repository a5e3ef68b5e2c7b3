// One colour per node, the same on every tab: by the order in which the nodes joined the mesh.

import { untrack } from 'svelte';
import { live } from '../api/live.svelte';

const HUES = 8;
const order = new Map<string, number>();

/** A CSS variable's name for the node: its place among the first eight, then one shared grey. */
export function nodeColour(nodeId: string): string {
  if (!order.has(nodeId)) {
    // All known nodes take their places first, so that the order does not depend on which tab is open.
    const known = untrack(() => [...live.nodes.values()]);
    known.sort((a, b) => (a.joined_ms ?? 0) - (b.joined_ms ?? 0) || (a.node_id < b.node_id ? -1 : 1));
    for (const id of [...known.map((node) => node.node_id), nodeId]) if (!order.has(id)) order.set(id, order.size);
  }
  const index = order.get(nodeId) ?? HUES;
  return index < HUES ? `var(--node-${index})` : 'var(--node-other)';
}

export function nodeName(nodeId: string, fallback?: string): string {
  return live.nodes.get(nodeId)?.name ?? fallback ?? nodeId;
}
