// The plan as POST /api/route/preview answers it (docs/routing.md).

export interface PlanStage {
  node_id: string;
  start_layer: number;
  end_layer: number;
}

export interface PlanRoute {
  model: string;
  window: [number, number] | null;
  node_ids: string[];
  stages: PlanStage[];
  hops: number;
  cost_ms: number | null;
}

export interface PlanTerm {
  kind: string;
  about: string;
  ms: number;
}

export interface PlanCandidate {
  roles: string[];
  route: PlanRoute;
  total_ms: number;
  terms: PlanTerm[];
  totals: Record<string, number>;
}

export interface Plan {
  route: PlanRoute;
  alternatives: PlanRoute[];
  standby: PlanRoute | null;
  explanation: {
    model: string;
    window: [number, number];
    cost_model: CostModelName;
    parameters: Record<string, unknown>;
    why: string;
    candidates: PlanCandidate[];
    excluded: { node_id: string; reason: string }[];
    exact: boolean;
  };
}

export type CostModelName = 'measured' | 'weighted';

export const WEIGHTS = ['latency', 'load', 'capacity', 'hop', 'prompt'] as const;
export type Weights = Record<(typeof WEIGHTS)[number], number>;

export interface RoutingChoice {
  cost_model: CostModelName;
  weights: Weights;
}

export interface RoutingSettings {
  default: RoutingChoice;
  models: Record<string, Partial<RoutingChoice> | undefined>;
}

export const EVEN: Weights = { latency: 1, load: 1, capacity: 1, hop: 1, prompt: 1 };
